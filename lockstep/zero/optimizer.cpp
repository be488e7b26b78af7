#include "lockstep/zero/optimizer.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/distributed/c10d/debug.h>
#include <torch/serialize/archive.h>

#include <algorithm>

#include "lockstep/base/str.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/failure_notice.h"
#include "lockstep/comm/world.h"
#include "lockstep/ddp/engine.h"
#include "lockstep/join/join.h"
#include "lockstep/zero/element_slices.h"
#include "lockstep/zero/objects.h"
#include "lockstep/zero/overlap.h"
#include "lockstep/zero/parameter_checks.h"
#include "lockstep/zero/whole_parameters.h"

namespace lockstep {
namespace {

using Groups = std::vector<torch::optim::OptimizerParamGroup>;

GroupPtr group_of(const ZeroOptions& options) {
  if (!options.process_group) {
    const auto ddp = options.ddp.engine();
    return ddp ? ddp->group() : default_group();
  }
  if (*options.process_group) return *options.process_group;
  const auto world = current_world();
  TORCH_CHECK_VALUE(false, "[lockstep/zero] rank ", world ? str(world->rank(), " of ", world->world_size()) : "unknown",
                    ": this rank is not in the process group it was given, which is null. Only ranks of the group may ",
                    "make a ZeroRedundancyOptimizer on it.");
}

ZeroOptions with_partition(ZeroOptions options) {
  if (!options.partition) {
    options.partition = options.stage == ZeroStage::kGradients ? ZeroPartition::kElements : ZeroPartition::kParameters;
  }
  return options;
}

class StepAgain final : public JoinHook {
 public:
  explicit StepAgain(ZeroOptimizer& optimizer) : optimizer_(optimizer) {}
  // notify() inside of it does nothing on a joined rank.
  void main_hook() override { optimizer_.step(); }

 private:
  ZeroOptimizer& optimizer_;
};

int64_t bytes_in(const NamedValues& values) {
  int64_t bytes = 0;
  for (const auto& [name, value] : values) {
    if (value.isTensor() && value.toTensor().defined()) bytes += static_cast<int64_t>(value.toTensor().nbytes());
  }
  return bytes;
}

}  // namespace

ZeroOptimizer::ZeroOptimizer(const Groups& groups, LocalOptimizerType type, ZeroOptions options)
    : Optimizer(Groups(), type.defaults->clone()),
      type_(std::move(type)),
      options_(with_partition(std::move(options))),
      group_(group_of(options_)) {
  check_arguments(groups);
  for (const auto& group : groups) append_group(group);
  default_device_ = all_parameters().front().device();
  partition_.emplace(*this, options_.stage == ZeroStage::kReplicated ? 1 : group_->getSize(), who());
  for (const auto& parameter : all_parameters()) is_trainable_.push_back(parameter.requires_grad());
  if (options_.overlap_with_ddp) {
    overlap_ = std::make_shared<detail::ZeroOverlap>(*this);
    return;
  }
  if (!options_.params_per_rank.empty()) partition_->partition(options_.params_per_rank);
  make_sharding();
  local_ = type_.make(local_groups());
  copy_options(*local_, *this);
}

ZeroOptimizer::~ZeroOptimizer() {
  if (overlap_) overlap_->detach();
  if (has_sharded_gradients()) give_gradients_back();
}

std::string ZeroOptimizer::who() const {
  return str("[lockstep/zero] rank ", group_->getRank(), " of ", group_->getSize());
}

void ZeroOptimizer::append_group(const torch::optim::OptimizerParamGroup& group) {
  // Options go around the base class, which replaces those it does not know by the defaults.
  Optimizer::add_param_group(torch::optim::OptimizerParamGroup(group.params()));
  param_groups_.back().set_options(group.has_options() ? group.options().clone() : defaults_->clone());
  auto& known = known_.emplace_back();
  for (const auto& parameter : group.params()) known.push_back(parameter.unsafeGetTensorImpl());
}

std::vector<std::vector<at::Tensor>> ZeroOptimizer::parameter_groups() const {
  std::vector<std::vector<at::Tensor>> groups;
  for (const auto& group : param_groups_) groups.push_back(group.params());
  return groups;
}

std::vector<at::Tensor> ZeroOptimizer::all_parameters() const {
  std::vector<at::Tensor> all;
  for (const auto& group : param_groups_) all.insert(all.end(), group.params().begin(), group.params().end());
  return all;
}

void ZeroOptimizer::make_sharding() {
  const bool is_replicated = options_.stage == ZeroStage::kReplicated;
  if (is_replicated || options_.partition == ZeroPartition::kParameters) {
    sharding_ = std::make_unique<detail::WholeParameters>(*partition_, options_.parameters_as_bucket_view,
                                                          is_replicated ? nullptr : group_);
    return;
  }
  if (!sharding_)
    sharding_ = has_sharded_gradients() ? shard_gradients() : std::make_unique<detail::ElementSlices>(group_);
  static_cast<detail::ElementSlices&>(*sharding_).set_groups(parameter_groups());
}

LocalOptimizerType::Groups ZeroOptimizer::local_groups() const {
  LocalOptimizerType::Groups groups;
  const auto parameters = sharding_->local_parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    groups.emplace_back(parameters[i], param_groups_[i].options().clone());
  }
  return groups;
}

void ZeroOptimizer::add_param_group(const torch::optim::OptimizerParamGroup& group) {
  TORCH_CHECK(!overlap_, who(), ": overlap_with_ddp takes one parameter group, so none can be added");
  TORCH_CHECK(!has_sharded_gradients(), who(), ": with ZeroStage::kGradients the parameters are those of DDP, so no ",
              "group can be added");
  notice_new_groups();
  TORCH_CHECK(options_.params_per_rank.empty(), who(), ": params_per_rank says who has which parameter of one group, ",
              "so no other group can be added");
  auto groups = parameter_groups();
  groups.push_back(group.params());
  detail::check_parameters(groups, who());
  append_group(group);
  try {
    take_in_groups();
  } catch (...) {
    param_groups_.pop_back();
    known_.pop_back();
    partition_->clear();
    make_sharding();
    throw;
  }
}

void ZeroOptimizer::take_in_groups() {
  partition_->clear();
  make_sharding();
  const auto groups = local_groups();
  for (std::size_t i = local_->param_groups().size(); i < groups.size(); ++i) {
    type_.add_group(*local_, groups[i]);
    for (const auto& parameter : param_groups_[i].params()) is_trainable_.push_back(parameter.requires_grad());
  }
  copy_options(*local_, *this);
  consolidated_.reset();
}

void ZeroOptimizer::notice_new_groups() {
  std::vector<std::vector<const void*>> now;
  bool is_same = param_groups_.size() == known_.size();
  for (std::size_t i = 0; is_same && i < known_.size(); ++i) {
    const auto& parameters = param_groups_[i].params();
    is_same = parameters.size() == known_[i].size();
    for (std::size_t j = 0; is_same && j < parameters.size(); ++j) {
      is_same = parameters[j].unsafeGetTensorImpl() == known_[i][j];
    }
  }
  if (is_same) return;
  TORCH_CHECK(!overlap_ && !has_sharded_gradients(), who(), ": parameter groups were changed, which ",
              overlap_ ? "overlap_with_ddp" : "ZeroStage::kGradients", " does not allow");
  for (const auto& group : param_groups_) {
    auto& parameters = now.emplace_back();
    for (const auto& parameter : group.params()) parameters.push_back(parameter.unsafeGetTensorImpl());
  }
  const bool has_only_grown = now.size() > known_.size() && std::equal(known_.begin(), known_.end(), now.begin()) &&
                              options_.params_per_rank.empty();
  TORCH_CHECK(has_only_grown, who(), ": parameter groups were changed from outside. Groups can be added, by ",
              "add_param_group(); those that are there stay as they are.");
  detail::check_parameters(parameter_groups(), who());
  take_in_groups();
  known_ = std::move(now);
}

void ZeroOptimizer::notice_trainability() {
  std::vector<bool> now;
  now.reserve(is_trainable_.size());
  for (const auto& group : param_groups_) {
    for (const auto& parameter : group.params()) now.push_back(parameter.requires_grad());
  }
  if (now == is_trainable_) return;
  TORCH_CHECK(
      !overlap_ && !has_sharded_gradients(), who(), ": some parameters were frozen or are trainable now, which ",
      overlap_ ? "overlap_with_ddp" : "ZeroStage::kGradients", " does not allow: DDP's buckets would hold others");
  TORCH_WARN(who(), ": some parameters were frozen or are trainable now. Who updates which stays as it is.");
  is_trainable_ = std::move(now);
  if (sharding_->takes_gradients_in_place()) return sharding_->on_trainability_change();
  const auto held = sharding_->pieces(*local_);
  sharding_->on_trainability_change();
  rebuild_local(detail::source_of(held));
}

void ZeroOptimizer::prepare_step() {
  notice_new_groups();
  if (options_.check_same_on_all_ranks || c10d::debug_level() != c10d::DebugLevel::Off) check_same_on_all_ranks();
  notice_trainability();
}

void ZeroOptimizer::check_same_on_all_ranks() {
  lockstep::check_same_on_all_ranks("the parameters of ZeroRedundancyOptimizer", detail::facts_of(parameter_groups()),
                                    group_);
}

void ZeroOptimizer::rebuild_local(const detail::StateSource& source) {
  auto loaded = sharding_->load(source);
  auto local = type_.make(local_groups());
  // Some optimizers have state from the start.
  auto dict = state_dict_of(*local);
  for (auto& [position, values] : loaded.state) dict.state[position] = std::move(values);
  lockstep::load_state_dict(*local, dict);
  copy_options(*this, *local);
  local_ = std::move(local);
}

void ZeroOptimizer::take_gradients() {
  if (has_sharded_gradients() && !is_warned_of_whole_gradients_) warn_of_whole_gradients();
  if (sharding_->must_recut()) {
    const auto held = sharding_->pieces(*local_);
    rebuild_local(detail::source_of(held));
  }
  sharding_->take_gradients();
}

void ZeroOptimizer::warn_of_whole_gradients() {
  // Asked in every step: mostly there is none, and slices need not be looked at.
  const bool has_whole = std::any_of(param_groups_.begin(), param_groups_.end(), [](const auto& group) {
    return std::any_of(group.params().begin(), group.params().end(),
                       [](const at::Tensor& parameter) { return parameter.grad().defined(); });
  });
  if (!has_whole || !sharding_->own_gradients().empty()) return;
  is_warned_of_whole_gradients_ = true;
  TORCH_WARN(who(), ": this step uses no gradient, though there are some in .grad. With ZeroStage::kGradients it ",
             "uses those of averaged backwards only: call the DistributedDataParallel, not its module, and end ",
             "no_sync() before the last backward.");
}

void ZeroOptimizer::copy_options(torch::optim::Optimizer& from, torch::optim::Optimizer& to) const {
  TORCH_INTERNAL_ASSERT(from.param_groups().size() == to.param_groups().size(), who(), ": ", from.param_groups().size(),
                        " parameter groups on one side, ", to.param_groups().size(), " on the other");
  for (std::size_t i = 0; i < from.param_groups().size(); ++i) {
    const auto& source = from.param_groups()[i].options();
    auto& group = to.param_groups()[i];
    // In place where it can be: programs keep references to options.
    if (!type_.assign(source, group.options())) group.set_options(source.clone());
  }
}

void ZeroOptimizer::or_tell_others(const std::function<void()>& action) const {
  try {
    action();
  } catch (...) {
    announce_failure(group_, std::current_exception());
    throw;
  }
}

at::Tensor ZeroOptimizer::step(LossClosure closure) {
  if (overlap_) {
    TORCH_CHECK(!closure, who(), ": with overlap_with_ddp backwards do the steps, so a closure cannot be run in one");
    TORCH_WARN(who(), ": step() does nothing with overlap_with_ddp: backwards do the steps",
               overlap_->is_attached() ? "" : ", but no hook was made: register hook_with_zero_step() on DDP");
    return {};
  }
  return step_with(
      [](torch::optim::Optimizer& local, const LossClosure& given) { return given ? local.step(given) : local.step(); },
      std::move(closure));
}

at::Tensor ZeroOptimizer::step_with(const LocalStep& local_step, LossClosure closure) {
  TORCH_CHECK(!overlap_, who(), ": with overlap_with_ddp backwards do the steps, which cannot be replaced");
  Join::notify(*this);
  prepare_step();
  at::Tensor loss;
  or_tell_others([&] {
    if (!sharding_->takes_gradients_in_place()) {
      if (closure) {
        const at::AutoGradMode with_grad(true);
        loss = std::exchange(closure, nullptr)();
      }
      take_gradients();
    }
    copy_options(*this, *local_);
    const auto local_loss = local_step(*local_, closure);
    if (local_loss.defined()) loss = local_loss;
    copy_options(*local_, *this);
    sharding_->drop_gradients();
  });
  sharding_->sync();
  return loss;
}

at::Tensor ZeroOptimizer::clip_grad_norm_(double max_norm, double norm_type, bool error_if_nonfinite) {
  TORCH_CHECK(!overlap_, who(), ": with overlap_with_ddp parameters are updated when backward ends, so gradients ",
              "cannot be clipped before");
  TORCH_CHECK(Join::is_preparation_mirrored(*this), who(),
              ": in a Join scope ranks without inputs must clip too. Open ",
              "it with JoinSettings{.before_mirrored_step = [&] { optimizer.clip_grad_norm_(max_norm); }}.");
  notice_new_groups();
  const auto over_ranks = [&](at::Tensor& value, ShardReduce operation) {
    all_reduce(value, group_,
               operation == ShardReduce::kSum   ? ReduceOp::SUM
               : operation == ShardReduce::kMax ? ReduceOp::MAX
                                                : ReduceOp::MIN);
  };
  NormOptions options{.norm_type = norm_type, .error_if_nonfinite = error_if_nonfinite, .device = default_device_};
  if (options_.stage != ZeroStage::kReplicated) options.over_shards = over_ranks;
  const auto norm = get_total_norm(sharding_->own_gradients(), options);
  scale_to_norm_(held_gradients(), max_norm, norm);
  return norm;
}

void ZeroOptimizer::zero_grad(bool set_to_none) {
  Optimizer::zero_grad(set_to_none);
  if (has_sharded_gradients()) sharding_->drop_gradients();
}

std::vector<at::Tensor> ZeroOptimizer::held_gradients() {
  if (has_sharded_gradients()) return sharding_->own_gradients();
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : all_parameters()) {
    if (parameter.grad().defined()) gradients.push_back(parameter.grad());
  }
  return gradients;
}

ZeroMemoryReport ZeroOptimizer::memory_report() const {
  ZeroMemoryReport report;
  for (const auto& parameter : all_parameters()) report.parameters += static_cast<int64_t>(parameter.nbytes());
  if (overlap_) {
    for (const auto& piece : overlap_->pieces()) report.state += bytes_in(piece.values);
    report.buckets = overlap_->bucket_bytes();
    return report;
  }
  for (const auto& [position, values] : state_dict_of(*local_).state) report.state += bytes_in(values);
  const auto kept = sharding_->bytes();
  report.buckets = kept.buckets;
  report.gradients = kept.gradients;
  report.temporaries = kept.temporaries;
  return report;
}

PartitionCache& ZeroOptimizer::partition() {
  TORCH_CHECK(options_.stage != ZeroStage::kReplicated, who(), ": with ZeroStage::kReplicated nothing is divided");
  TORCH_CHECK(options_.partition == ZeroPartition::kParameters, who(),
              ": with ZeroPartition::kElements parameters belong to several ranks, so nobody has one");
  if (overlap_) overlap_->check_initialized("a partition");
  return *partition_;
}

const std::vector<std::pair<c10::Device, std::vector<std::vector<at::Tensor>>>>&
ZeroOptimizer::device_to_params_per_rank() {
  TORCH_CHECK(options_.parameters_as_bucket_view && !overlap_, who(),
              ": parameters are told apart by device for bucket views only. Set parameters_as_bucket_view.");
  return partition().device_to_params_per_rank();
}

const OverlapInfo& ZeroOptimizer::overlap_info() const {
  return overlap_for("overlap_info()").info();
}

detail::ZeroOverlap& ZeroOptimizer::overlap_for(const char* what) const {
  TORCH_CHECK_VALUE(overlap_, who(), ": ", what, " needs an optimizer that was made with overlap_with_ddp");
  return *overlap_;
}

torch::optim::Optimizer& ZeroOptimizer::local() {
  TORCH_CHECK(local_, who(), ": with overlap_with_ddp there is no local optimizer but a functional one");
  return *local_;
}

std::unique_ptr<JoinHook> ZeroOptimizer::join_hook(const JoinOptions& /*options*/) {
  if (overlap_) {
    TORCH_WARN(who(), ": with overlap_with_ddp the scope needs DDP only, whose hook does the steps of joined ranks");
    return std::make_unique<JoinHook>();
  }
  return std::make_unique<StepAgain>(*this);
}

}  // namespace lockstep
