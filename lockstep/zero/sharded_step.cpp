#include "lockstep/zero/sharded_step.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace lockstep::detail {

ShardedStep::ShardedStep(torch::optim::Optimizer& whole, const LocalOptimizerType& type,
                         std::unique_ptr<Division> division, std::optional<at::ScalarType> master_dtype,
                         std::string who)
    : whole_(whole), type_(type), division_(std::move(division)), who_(std::move(who)), masters_(master_dtype, who_) {
  division_->set_groups(whole_groups());
  local_ = type_.make(local_groups());
  copy_options(*local_, whole_);
}

std::vector<std::vector<at::Tensor>> ShardedStep::whole_groups() const {
  std::vector<std::vector<at::Tensor>> groups;
  for (const auto& group : whole_.param_groups()) groups.push_back(group.params());
  return groups;
}

LocalOptimizerType::Groups ShardedStep::local_groups() {
  LocalOptimizerType::Groups groups;
  const auto parameters = masters_.stepped_in_place_of(division_->local_parameters());
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    groups.emplace_back(parameters[i], whole_.param_groups()[i].options().clone());
  }
  return groups;
}

void ShardedStep::copy_options(torch::optim::Optimizer& from, torch::optim::Optimizer& to) const {
  TORCH_INTERNAL_ASSERT(from.param_groups().size() == to.param_groups().size(), who_, ": ", from.param_groups().size(),
                        " parameter groups on one side, ", to.param_groups().size(), " on the other");
  for (std::size_t i = 0; i < from.param_groups().size(); ++i) {
    assign_options(from.param_groups()[i].options(), to.param_groups()[i]);
  }
}

void ShardedStep::assign_options(const torch::optim::OptimizerOptions& from,
                                 torch::optim::OptimizerParamGroup& to) const {
  // In place where it can be: programs keep references to options.
  if (!type_.assign(from, to.options())) to.set_options(from.clone());
}

void ShardedStep::on_group_change() {
  division_->set_groups(whole_groups());
  const auto groups = local_groups();
  const auto count_before = std::min(local_->param_groups().size(), groups.size());
  // What a program has set since the last step would be lost when options are copied back.
  for (std::size_t i = 0; i < count_before; ++i) {
    assign_options(whole_.param_groups()[i].options(), local_->param_groups()[i]);
  }
  // After a failed addition the local optimizer has as many groups as before, and none is added.
  for (std::size_t i = count_before; i < groups.size(); ++i) type_.add_group(*local_, groups[i]);
  copy_options(*local_, whole_);
}

void ShardedStep::on_trainability_change() {
  if (division_->takes_gradients_in_place()) return division_->on_trainability_change();
  const auto held = pieces();
  division_->on_trainability_change();
  rebuild_local(source_of(held));
}

OptimizerStateDict ShardedStep::local_state() const {
  auto state = state_dict_of(*local_);
  masters_.add_to(state);
  return state;
}

void ShardedStep::rebuild_local(const StateSource& source) {
  auto loaded = division_->load(source);
  const auto groups = local_groups();
  const auto masters = masters_.taken_from(loaded);
  masters_.cast(loaded);
  // Some optimizers have state from the start.
  auto dict = state_dict_of(*type_.make(groups));
  for (auto& [position, values] : loaded.state) dict.state[position] = std::move(values);
  // In place: an optimizer of a program's own may have members that no dictionary knows.
  std::vector<std::vector<at::Tensor>> parameters;
  for (const auto& group : groups) parameters.push_back(group.params());
  exchange_parameters(parameters);
  try {
    load_state_dict(*local_, dict);
  } catch (...) {
    exchange_parameters(parameters);
    throw;
  }
  masters_.set(masters);
  copy_options(whole_, *local_);
}

void ShardedStep::exchange_parameters(std::vector<std::vector<at::Tensor>>& parameters) {
  for (std::size_t i = 0; i < parameters.size(); ++i) parameters[i].swap(local_->param_groups()[i].params());
}

void ShardedStep::load(const StateSource& source) {
  if (division_->takes_gradients_in_place()) {
    auto loaded = division_->load(source);
    const auto masters = masters_.taken_from(loaded);
    masters_.cast(loaded);
    load_state_dict(*local_, loaded);
    return masters_.set(masters);
  }
  const auto held = pieces();
  try {
    rebuild_local(source);
  } catch (...) {
    rebuild_local(source_of(held));
    throw;
  }
}

at::Tensor ShardedStep::step(const LocalStep& local_step, torch::optim::Optimizer::LossClosure closure) {
  at::Tensor loss;
  masters_.follow_parameters();
  if (!division_->takes_gradients_in_place() || masters_.are_wanted()) {
    if (closure) {
      const at::AutoGradMode with_grad(true);
      loss = std::exchange(closure, nullptr)();
    }
    take_gradients();
  }
  copy_options(whole_, *local_);
  const auto local_loss = local_step(*local_, closure);
  if (local_loss.defined()) loss = local_loss;
  masters_.write_back();
  copy_options(*local_, whole_);
  division_->drop_gradients();
  return loss;
}

std::vector<at::Tensor> ShardedStep::own_parameters() const {
  std::vector<at::Tensor> all;
  for (const auto& group : division_->local_parameters()) all.insert(all.end(), group.begin(), group.end());
  return all;
}

ShardingBytes ShardedStep::bytes() const {
  auto bytes = division_->bytes();
  for (const auto& [position, values] : local_state().state) bytes.state += bytes_of(values);
  return bytes;
}

void ShardedStep::take_gradients() {
  if (division_->has_only_whole_gradients() && !std::exchange(has_warned_of_whole_gradients_, true)) {
    TORCH_WARN(who_,
               ": this step uses no gradient that the optimizer's DistributedDataParallel has averaged, but what ",
               "this rank has in .grad, for its shard. Call the DistributedDataParallel, not its module, and end ",
               "no_sync() before the last backward; if the module was wrapped anew, make the optimizer anew too, else ",
               "gradients are whole on every rank.");
  }
  if (division_->must_recut()) {
    const auto held = pieces();
    rebuild_local(source_of(held));
  }
  division_->take_gradients();
  masters_.take_gradients();
}

}  // namespace lockstep::detail
