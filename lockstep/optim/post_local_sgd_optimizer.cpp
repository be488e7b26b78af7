#include "lockstep/optim/post_local_sgd_optimizer.h"

#include <c10/util/Exception.h>

#include <type_traits>

#include "lockstep/optim/group_options.h"
#include "lockstep/state/optimizer_state.h"

namespace lockstep {
namespace {

constexpr char kPostLocal[] = "[lockstep/optim] PostLocalSGDOptimizer";
constexpr char kStepKey[] = "step";

using OptimizerState = std::remove_reference_t<decltype(std::declval<torch::optim::Optimizer&>().state())>;

/// The optimizer inside has the state while one lives.
class LentState {
 public:
  LentState(OptimizerState& mine, OptimizerState& theirs) : mine_(mine), theirs_(theirs) { mine_.swap(theirs_); }
  ~LentState() { mine_.swap(theirs_); }
  LentState(const LentState&) = delete;
  LentState& operator=(const LentState&) = delete;

 private:
  OptimizerState& mine_;
  OptimizerState& theirs_;
};

torch::optim::Optimizer& checked_inner(const std::shared_ptr<torch::optim::Optimizer>& optim,
                                       const std::shared_ptr<ModelAverager>& averager) {
  TORCH_CHECK(optim, kPostLocal, " was given no optimizer");
  TORCH_CHECK(averager, kPostLocal, " was given no averager");
  TORCH_CHECK(dynamic_cast<const ShardedGradients*>(optim.get()) == nullptr, kPostLocal,
              ": the optimizer inside divides its work among ranks, or averages already. It must be one that updates ",
              "all parameters on every rank.");
  return *optim;
}

}  // namespace

PostLocalSGDOptimizer::PostLocalSGDOptimizer(std::shared_ptr<torch::optim::Optimizer> optim,
                                             std::shared_ptr<ModelAverager> averager)
    : Optimizer(std::vector<torch::optim::OptimizerParamGroup>(), checked_inner(optim, averager).defaults().clone()),
      optim_(std::move(optim)),
      averager_(std::move(averager)) {
  for (const auto& group : optim_->param_groups()) append_group(*this, group);
  state_ = std::move(optim_->state());
  optim_->state().clear();
  hand_over_groups();
}

void PostLocalSGDOptimizer::append_group(torch::optim::Optimizer& to, const torch::optim::OptimizerParamGroup& group) {
  to.add_param_group(torch::optim::OptimizerParamGroup(group.params()));
  to.param_groups().back().set_options(group.has_options() ? group.options().clone() : to.defaults().clone());
}

void PostLocalSGDOptimizer::add_param_group(const torch::optim::OptimizerParamGroup& group) {
  append_group(*this, group);
  hand_over_groups();
}

void PostLocalSGDOptimizer::hand_over_groups() const {
  auto& theirs = optim_->param_groups();
  for (auto i = theirs.size(); i < param_groups_.size(); ++i) append_group(*optim_, param_groups_[i]);
  TORCH_CHECK(theirs.size() == param_groups_.size(), kPostLocal, ": the optimizer inside was given a parameter group. ",
              "Add groups to the PostLocalSGDOptimizer.");
  given_.resize(theirs.size());
  for (std::size_t i = 0; i < theirs.size(); ++i) {
    theirs[i].params() = param_groups_[i].params();
    theirs[i].set_options(param_groups_[i].options().clone());
    given_[i] = optim::numbers_of(theirs[i].options());
  }
}

void PostLocalSGDOptimizer::take_over_options() {
  for (std::size_t i = 0; i < param_groups_.size(); ++i) {
    const auto& theirs = optim_->param_groups()[i].options();
    param_groups_[i].set_options(theirs.clone());
    given_[i] = optim::numbers_of(theirs);
  }
}

void PostLocalSGDOptimizer::check_is_untouched() const {
  for (std::size_t i = 0; i < given_.size() && i < optim_->param_groups().size(); ++i) {
    const auto now = optim::numbers_of(optim_->param_groups()[i].options());
    for (std::size_t j = 0; j < now.size(); ++j) {
      TORCH_CHECK(now[j].second == given_[i][j].second, kPostLocal, ": ", now[j].first, " of the optimizer inside was ",
                  "changed from ", given_[i][j].second, " to ", now[j].second, " in parameter group ", i,
                  ". Change param_groups() of the PostLocalSGDOptimizer, and give schedulers that one.");
    }
  }
}

at::Tensor PostLocalSGDOptimizer::step(LossClosure closure) {
  check_is_untouched();
  hand_over_groups();
  at::Tensor loss;
  {
    const LentState lent(state_, optim_->state());
    loss = optim_->step(std::move(closure));
  }
  averager_->average_parameters(param_groups_);
  return loss;
}

void PostLocalSGDOptimizer::save(torch::serialize::OutputArchive& archive) const {
  check_is_untouched();
  hand_over_groups();
  // Copies that share their tensors: this optimizer is not to be changed.
  OptimizerState copies;
  for (const auto& [key, value] : state_) copies[key] = value->clone();
  {
    const LentState lent(copies, optim_->state());
    optim_->save(archive);
  }
  archive.write(kStepKey, c10::IValue(averager_->step()));
}

void PostLocalSGDOptimizer::load(torch::serialize::InputArchive& archive) {
  hand_over_groups();
  try {
    const LentState lent(state_, optim_->state());
    optim_->load(archive);
  } catch (...) {
    hand_over_groups();  // it may have taken some options
    throw;
  }
  take_over_options();
  c10::IValue step;
  if (archive.try_read(kStepKey, step)) {
    averager_->set_step(step.toInt());
  } else {
    TORCH_WARN(kPostLocal, ": loaded state dict does not contain a step counter for an averager. Setting step counter ",
               "to 0.");
    averager_->set_step(0);
  }
}

std::vector<GradientShard> PostLocalSGDOptimizer::own_gradients() {
  return shards_by_layout(optimized_parameters(*this));
}

c10::Device PostLocalSGDOptimizer::gradient_device() const {
  const auto params = optimized_parameters(*this);
  return params.empty() ? c10::Device(c10::DeviceType::CPU) : params[0].device();
}

}  // namespace lockstep
