#include "lockstep/zero/optimizer.h"

#include <c10/util/Logging.h>
#include <torch/csrc/distributed/c10d/debug.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <utility>

#include "lockstep/base/str.h"
#include "lockstep/comm/call_label.h"
#include "lockstep/comm/failure_notice.h"
#include "lockstep/comm/world.h"
#include "lockstep/ddp/averaging_group.h"
#include "lockstep/ddp/engine.h"
#include "lockstep/intercept/key.h"
#include "lockstep/join/join.h"
#include "lockstep/zero/element_slices.h"
#include "lockstep/zero/overlap.h"
#include "lockstep/zero/parameter_checks.h"
#include "lockstep/zero/sharded_step.h"
#include "lockstep/zero/whole_parameters.h"

namespace lockstep {
namespace {

using Groups = std::vector<torch::optim::OptimizerParamGroup>;

void check_has_this_rank(const GroupPtr& group) {
  if (group) return;
  const auto world = current_world();
  TORCH_CHECK(
      false, "[lockstep/zero] rank ", world ? str(world->rank(), " of ", world->world_size()) : "unknown",
      ": this rank is not in the process group it was given, which is null. Only ranks of the group may make a ",
      "ZeroRedundancyOptimizer on it.");
}

/// Without a group of its own that over which the gradients are averaged: elsewhere they are not the same.
GroupPtr group_of(const ZeroOptions& options, const Groups& groups) {
  if (options.process_group) {
    check_has_this_rank(*options.process_group);
    return *options.process_group;
  }
  if (const auto ddp = options.ddp.engine()) return ddp->group();
  for (const auto& group : groups) {
    for (const auto& parameter : group.params()) {
      if (auto averaging = parameter.defined() ? averaging_group(parameter) : nullptr) return averaging;
    }
  }
  return default_group();
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

}  // namespace

ZeroOptimizer::ZeroOptimizer(const Groups& groups, LocalOptimizerType type, ZeroOptions options)
    : Optimizer(Groups(), type.defaults->clone()),
      type_(std::move(type)),
      options_(with_partition(std::move(options))),
      group_(group_of(options_, groups)),
      // There DDP's buckets say who has what.
      must_compare_(!options_.overlap_with_ddp),
      has_compared_(options_.overlap_with_ddp) {
  check_arguments(groups);
  for (const auto& group : groups) append_group(group);
  default_device_ = all_parameters().front().device();
  partition_.emplace(*this, options_.stage == ZeroStage::kReplicated ? 1 : group_->getSize(), who());
  for (const auto& parameter : all_parameters()) {
    is_trainable_.push_back(parameter.requires_grad());
    dtypes_.push_back(parameter.scalar_type());
  }
  if (!options_.params_per_rank.empty()) partition_->partition(options_.params_per_rank);
  try {
    sharding_ = made_sharding();
  } catch (...) {
    // DDP would go on to give its gradients to an optimizer that is not there.
    if (is_scatter_set_) options_.ddp.engine()->reducer()->clear_scatter();
    throw;
  }
  mark_parameters();
}

ZeroOptimizer::~ZeroOptimizer() {
  try {
    if (arriving_) arriving_->wait();
  } catch (const std::exception& error) {
    LOG(WARNING) << "[lockstep/zero] parameters of the last step did not arrive, and cannot be read: " << error.what();
  }
  sharding_->detach();
  if (has_sharded_gradients()) give_gradients_back();
}

bool ZeroOptimizer::overlaps_forwards() const {
  return options_.overlap_parameter_sync && options_.stage != ZeroStage::kReplicated && group_->getSize() > 1;
}

void ZeroOptimizer::mark_parameters() const {
  if (!overlaps_forwards()) return;
  for (const auto& parameter : all_parameters()) mark_intercepted(parameter);
}

void ZeroOptimizer::wait_for_parameters() {
  if (arriving_) {
    arriving_->wait();
    arriving_.reset();
    steps_synced_ = steps_taken_;
  }
  detail::wait_for_others(all_parameters());
}

std::shared_ptr<detail::Sharding> ZeroOptimizer::made_sharding() {
  if (options_.overlap_with_ddp) return std::make_shared<detail::ZeroOverlap>(*this);
  return std::make_shared<detail::ShardedStep>(*this, type_, made_division(), options_.master_dtype, who());
}

std::unique_ptr<detail::Division> ZeroOptimizer::made_division() {
  const bool is_replicated = options_.stage == ZeroStage::kReplicated;
  if (is_replicated || options_.partition == ZeroPartition::kParameters) {
    return std::make_unique<detail::WholeParameters>(*partition_, options_.parameters_as_bucket_view,
                                                     overlaps_forwards(), is_replicated ? nullptr : group_);
  }
  if (has_sharded_gradients()) return shard_gradients();
  return std::make_unique<detail::ElementSlices>(group_, overlaps_forwards());
}

const char* ZeroOptimizer::option_that_fixes_groups() const {
  if (options_.overlap_with_ddp) return "overlap_with_ddp";
  return has_sharded_gradients() ? "ZeroStage::kGradients" : nullptr;
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

void ZeroOptimizer::add_param_group(const torch::optim::OptimizerParamGroup& group) {
  TORCH_CHECK(!options_.overlap_with_ddp, who(), ": overlap_with_ddp takes one parameter group, so none can be added");
  TORCH_CHECK(!has_sharded_gradients(), who(), ": with ZeroStage::kGradients the parameters are those of DDP, so no ",
              "group can be added");
  wait_for_parameters();
  notice_new_groups();
  TORCH_CHECK(options_.params_per_rank.empty(), who(), ": params_per_rank says who has which parameter of one group, ",
              "so no other group can be added");
  auto groups = parameter_groups();
  groups.push_back(group.params());
  check_parameters(groups);
  append_group(group);
  try {
    take_in_groups();
  } catch (...) {
    param_groups_.pop_back();
    known_.pop_back();
    partition_->clear();
    sharding_->on_group_change();
    throw;
  }
}

void ZeroOptimizer::take_in_groups() {
  partition_->clear();
  sharding_->on_group_change();
  const auto parameters = all_parameters();
  for (auto i = is_trainable_.size(); i < parameters.size(); ++i) {
    is_trainable_.push_back(parameters[i].requires_grad());
    dtypes_.push_back(parameters[i].scalar_type());
  }
  consolidated_.reset();
  must_compare_ = true;
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
  wait_for_parameters();
  const auto* fixed_by = option_that_fixes_groups();
  TORCH_CHECK(fixed_by == nullptr, who(), ": parameter groups were changed, which ", fixed_by, " does not allow");
  for (const auto& group : param_groups_) {
    auto& parameters = now.emplace_back();
    for (const auto& parameter : group.params()) parameters.push_back(parameter.unsafeGetTensorImpl());
  }
  const bool has_only_grown = now.size() > known_.size() && std::equal(known_.begin(), known_.end(), now.begin()) &&
                              options_.params_per_rank.empty();
  TORCH_CHECK(has_only_grown, who(), ": parameter groups were changed from outside. Groups can be added, by ",
              "add_param_group(); those that are there stay as they are.");
  check_parameters(parameter_groups());
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
  const auto* fixed_by = option_that_fixes_groups();
  TORCH_CHECK(fixed_by == nullptr, who(), ": some parameters were frozen or are trainable now, which ", fixed_by,
              " does not allow: DDP's buckets would hold others");
  TORCH_WARN(who(), ": some parameters were frozen or are trainable now. Who updates which stays as it is.");
  sharding_->on_trainability_change();
  is_trainable_ = std::move(now);  // if that throws, the next step tries again
}

void ZeroOptimizer::notice_moved_parameters() {
  const auto buffers = sharding_->flat_buffers();
  const bool has_moved =
      std::any_of(buffers.begin(), buffers.end(), [](const auto* each) { return each->has_moved(); });
  if (has_moved) detail::take_back_moved(buffers, parameter_groups(), who());
  // Those that keep their own memory: state, masters and messages are of the dtype they had.
  const auto parameters = all_parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    TORCH_CHECK(parameters[i].scalar_type() == dtypes_[i], who(), ": parameter ", i, " was of ", dtypes_[i],
                " when the optimizer was made, and is of ", parameters[i].scalar_type(),
                " now. Make the optimizer anew after such a change.");
  }
}

void ZeroOptimizer::notice_changes() {
  refuse_aloud([&] {
    notice_new_groups();
    notice_moved_parameters();
  });
}

void ZeroOptimizer::prepare_step() {
  notice_changes();
  if (options_.check_same_on_all_ranks || c10d::debug_level() != c10d::DebugLevel::Off) check_same_on_all_ranks();
  refuse_aloud([&] { notice_trainability(); });
  compare_once();
}

void ZeroOptimizer::check_same_on_all_ranks() {
  lockstep::check_same_on_all_ranks("the parameters of ZeroRedundancyOptimizer", detail::facts_of(parameter_groups()),
                                    group_);
}

void ZeroOptimizer::announce_if_throws(const std::function<void()>& action) const {
  try {
    action();
  } catch (...) {
    announce_failure(group_, std::current_exception());
    throw;
  }
}

void ZeroOptimizer::refuse_aloud(const std::function<void()>& check) const {
  try {
    check();
  } catch (...) {
    announce_refusal(group_, std::current_exception());
    throw;
  }
}

at::Tensor ZeroOptimizer::step(LossClosure closure) {
  if (auto* overlap = sharding_->as_overlap()) {
    TORCH_CHECK(!closure, who(), ": with overlap_with_ddp backwards do the steps, so a closure cannot be run in one");
    TORCH_WARN(who(), ": step() does nothing with overlap_with_ddp: backwards do the steps",
               overlap->is_attached() ? "" : ", but no hook was made: register hook_with_zero_step() on DDP");
    return {};
  }
  return step_with(
      [](torch::optim::Optimizer& local, const LossClosure& given) { return given ? local.step(given) : local.step(); },
      std::move(closure));
}

at::Tensor ZeroOptimizer::step_with(const LocalStep& local_step, LossClosure closure) {
  TORCH_CHECK(!options_.overlap_with_ddp, who(),
              ": with overlap_with_ddp backwards do the steps, which cannot be replaced");
  if (std::exchange(is_step_taken_, false)) return {};
  if (options_.stage != ZeroStage::kReplicated) Join::check_listed(*this);
  begin_join_iteration();
  has_begun_join_iteration_ = false;
  wait_for_parameters();
  prepare_step();
  at::Tensor loss;
  announce_if_throws([&] { loss = sharding_->step(local_step, std::move(closure)); });
  ++steps_taken_;
  ++steps_since_consolidation_;
  note_join_step();
  send_parameters();
  steps_ended_ = steps_taken_;
  return loss;
}

void ZeroOptimizer::send_parameters() {
  const LabelScope label({"ZeRO's step"});
  auto arrivals = sharding_->launch_sync();
  if (overlaps_forwards()) {
    arriving_ = std::make_unique<detail::ArrivingParameters>(std::move(arrivals), who());
    return mark_parameters();
  }
  for (auto& each : arrivals) each.wait();
  steps_synced_ = steps_taken_;
}

at::Tensor ZeroOptimizer::clip_grad_norm_(double max_norm, double norm_type, bool error_if_nonfinite) {
  return lockstep::clip_grad_norm_(*this, max_norm, {.norm_type = norm_type, .error_if_nonfinite = error_if_nonfinite});
}

std::vector<GradientShard> ZeroOptimizer::gradients_for_norm() {
  check_preparation_is_mirrored();
  begin_join_iteration();
  refuse_aloud([&] { notice_new_groups(); });
  if (options_.stage == ZeroStage::kReplicated || options_.overlap_with_ddp) return own_gradients();
  return divided_gradients();
}

std::vector<GradientShard> ZeroOptimizer::divided_gradients() const {
  GradientShard shard{.groups = {group_}};
  refuse_aloud([&] { shard.gradients = sharding_->own_gradients(); });
  return {std::move(shard)};
}

std::vector<GradientShard> ZeroOptimizer::own_gradients() {
  TORCH_CHECK(!options_.overlap_with_ddp, who(), ": with overlap_with_ddp parameters are updated when backward ends, ",
              "so gradients cannot be clipped or unscaled before");
  check_preparation_is_mirrored();
  if (has_sharded_gradients()) return divided_gradients();
  GradientShard all;
  for (const auto& parameter : all_parameters()) {
    if (parameter.grad().defined()) all.gradients.push_back(parameter.grad());
  }
  return {std::move(all)};
}

std::vector<GroupPtr> ZeroOptimizer::stepping_groups() const {
  if (options_.stage == ZeroStage::kReplicated) return {};
  return {group_};
}

void ZeroOptimizer::discard_gradients() {
  if (has_sharded_gradients()) sharding_->drop_gradients();
}

void ZeroOptimizer::zero_grad(bool set_to_none) {
  Optimizer::zero_grad(set_to_none);
  // Else there are gradients still, all zeros.
  if (set_to_none) discard_gradients();
}

ZeroMemoryReport ZeroOptimizer::memory_report() const {
  ZeroMemoryReport report;
  for (const auto& parameter : all_parameters()) report.parameters += static_cast<int64_t>(parameter.nbytes());
  const auto kept = sharding_->bytes();
  report.state = kept.state;
  report.buckets = kept.buckets;
  report.gradients = kept.gradients;
  report.temporaries = kept.temporaries;
  if (const auto ddp = options_.ddp.engine(); ddp && has_sharded_gradients()) {
    report.temporaries += ddp->reducer()->pool_bytes();
  }
  return report;
}

PartitionCache& ZeroOptimizer::partition() {
  TORCH_CHECK(options_.stage != ZeroStage::kReplicated, who(), ": with ZeroStage::kReplicated nothing is divided");
  TORCH_CHECK(options_.partition == ZeroPartition::kParameters, who(),
              ": with ZeroPartition::kElements parameters belong to several ranks, so nobody has one");
  sharding_->check_has_state("a partition");
  return *partition_;
}

const std::vector<std::pair<c10::Device, std::vector<std::vector<at::Tensor>>>>&
ZeroOptimizer::device_to_params_per_rank() {
  TORCH_CHECK(options_.parameters_as_bucket_view && !options_.overlap_with_ddp, who(),
              ": parameters are told apart by device for bucket views only. Set parameters_as_bucket_view.");
  return partition().device_to_params_per_rank();
}

const OverlapInfo& ZeroOptimizer::overlap_info() const {
  return overlap_for("overlap_info()").info();
}

detail::ZeroOverlap& ZeroOptimizer::overlap_for(const char* what) const {
  auto* overlap = sharding_->as_overlap();
  TORCH_CHECK(overlap != nullptr, who(), ": ", what, " needs an optimizer that was made with overlap_with_ddp");
  return *overlap;
}

torch::optim::Optimizer& ZeroOptimizer::local() {
  auto* local = sharding_->local();
  TORCH_CHECK(local != nullptr, who(), ": with overlap_with_ddp there is no local optimizer but a functional one");
  return *local;
}

void ZeroOptimizer::check_preparation_is_mirrored() const {
  TORCH_CHECK(Join::is_preparation_mirrored(*this), who(),
              ": in a Join scope ranks without inputs must clip too, or whatever is done to gradients. Open ",
              "it with JoinSettings{.before_mirrored_step = [&] { optimizer.clip_grad_norm_(max_norm); }}.");
}

void ZeroOptimizer::begin_join_iteration() {
  if (!std::exchange(has_begun_join_iteration_, true)) Join::notify(*this);
}

void ZeroOptimizer::note_join_step() {
  if (!join_config().enable) return;
  join_progress_.add_step(step_options());
}

std::vector<std::pair<const char*, double>> ZeroOptimizer::step_options() const {
  std::vector<std::pair<const char*, double>> all;
  for (const auto& group : param_groups_) {
    for (const auto& number : optim::numbers_of(group.options())) all.push_back(number);
  }
  return all;
}

std::unique_ptr<JoinHook> ZeroOptimizer::join_hook(const JoinOptions& /*options*/) {
  has_begun_join_iteration_ = false;
  join_progress_ = {};
  if (options_.overlap_with_ddp) {
    TORCH_WARN(who(), ": with overlap_with_ddp the scope needs DDP only, whose hook does the steps of joined ranks");
    return std::make_unique<JoinHook>();
  }
  return std::make_unique<StepAgain>(*this);
}

}  // namespace lockstep
