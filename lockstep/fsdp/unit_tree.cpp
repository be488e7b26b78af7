#include "lockstep/fsdp/unit_tree.h"

#include <ATen/ops/full.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cmath>
#include <unordered_set>
#include <utility>

#include "lockstep/base/env.h"
#include "lockstep/base/str.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/current_stream.h"
#include "lockstep/comm/failure_notice.h"
#include "lockstep/comm/objects.h"
#include "lockstep/fsdp/unit_registry.h"
#include "lockstep/intercept/operator_call.h"
#include "lockstep/nn/gradient_access.h"
#include "lockstep/nn/module_tensors.h"
#include "lockstep/nn/saved_tensors.h"
#include "lockstep/shard/layout_of.h"

namespace lockstep::detail {
namespace {

bool is_backward_running() {
  return torch::autograd::get_current_graph_task_id() >= 0;
}

bool is_debugging() {
  const auto level = env("TORCH_DISTRIBUTED_DEBUG").value_or("OFF");
  return level == "INFO" || level == "DETAIL";
}

const std::string* changed_parameter(const Unit& unit) {
  for (const auto& group : unit.groups()) {
    if (const auto* name = group->changed_since_gather()) return name;
  }
  return nullptr;
}

const c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

/// Writes that leave values alone.
bool is_harmless(const std::string& operator_name) {
  return operator_name == "aten::requires_grad_" || operator_name == "aten::retain_grad";
}

/// What this rank refuses by itself is told to the others, who would wait for it: those that shard, and those that hold
/// other parts of what tensor parallelism cut.
template <class Action>
void or_refuse(const Unit& unit, const Action& action) {
  try {
    action();
  } catch (const c10::DistBackendError&) {
    throw;
  } catch (...) {
    announce_refusal(unit.mesh().get_group(unit.mesh().ndim() - 1), std::current_exception());
    for (const auto& group : unit.groups_before()) announce_refusal(group, std::current_exception());
    throw;
  }
}

/// The sum over all ranks of the mesh.
double sum_over(const DeviceMesh& mesh, double value, at::Device device) {
  const auto total = at::full({1}, value, at::TensorOptions(at::kDouble).device(device));
  const LabelScope label({"FSDP's weights"});
  for (const auto& group : mesh.get_all_groups()) all_reduce(total, group);
  return total.item<double>();
}

}  // namespace

bool is_plain_backward() {
  return is_backward_running() && !at::GradMode::is_enabled() && !is_recomputing();
}

void UnitTree::make(const UnitPtr& unit, const std::vector<UnitPtr>& below) {
  const auto tree = std::make_shared<UnitTree>();
  for (const auto& root : below) {
    const auto before = root->tree_;
    for (const auto& each : before->units_) {
      const auto alive = each.lock();
      if (!alive) continue;
      alive->number_ = static_cast<int>(tree->units_.size());
      alive->tree_ = tree;
      tree->units_.push_back(alive);
    }
    root->parent_ = unit;
    if (unit->groups_.empty()) root->kept_parent_ = unit;
  }
  unit->number_ = static_cast<int>(tree->units_.size());
  unit->tree_ = tree;
  tree->units_.push_back(unit);
  if (below.empty()) return;
  for_each_module(*unit->module(), [&](const std::string& name, const torch::nn::Module& module) {
    const auto found = name.empty() ? nullptr : find_unit(module);
    if (found && found->module().get() == &module) found->set_name(name);
  });
}

UnitPtr UnitTree::unit_at(int number) const {
  return number == TouchOrder::kNone ? nullptr : units_[static_cast<std::size_t>(number)].lock();
}

std::vector<UnitPtr> UnitTree::units() const {
  std::vector<UnitPtr> alive;
  for (const auto& each : units_) {
    if (auto unit = each.lock()) alive.push_back(std::move(unit));
  }
  return alive;
}

std::vector<UnitPtr> UnitTree::below(const Unit& unit, bool recurse) const {
  std::vector<UnitPtr> chosen;
  for (auto& each : units()) {
    if (each.get() == &unit || (recurse && each->is_inside(unit))) chosen.push_back(std::move(each));
  }
  return chosen;
}

void UnitTree::check_access(const Unit& unit, const OperatorCall& call, c10::ArrayRef<TouchedTensor> touched) const {
  for (const auto& each : touched) {
    if (!each.is_written || is_harmless(call.name())) continue;
    for (const auto& group : unit.groups()) {
      for (const auto& member : group->members()) {
        for (const auto& handle : member.handles) {
          TORCH_CHECK(storage_of(handle.tensor()) != storage_of(each.tensor), unit.who(), ": ", call.name(),
                      " writes to parameter '", handle.name,
                      "', which is whole only while it is used: the change would be lost. Change the ",
                      "shard in parameters(), or open a summon_full_params() scope. If an optimizer does it, it was ",
                      "made before fully_shard() or of members: make it of parameters() after fully_shard().");
        }
      }
    }
  }
}

bool UnitTree::is_in_backward() const {
  return mirrored_ ? is_backward_mirrored_ : is_backward_running();
}

void UnitTree::enter_pass(bool is_recorded) {
  const bool has_thrown = pass_ == Pass::kBackward && backward_.expired();
  if (has_thrown && has_kept()) {
    const auto root = units_.back().lock();
    TORCH_WARN(root ? root->who() : "[lockstep/fsdp]", ": a backward has thrown, and gradients that earlier ones set ",
               "aside under no_sync() are dropped with it: it may have added to some of them. Begin the step anew, or ",
               "zero gradients.");
  }
  if (has_thrown) forget_step();
  if (are_whole_refused_ && (is_recorded || is_in_backward())) accept_whole();
  if (is_in_backward()) return enter_backward();
  if (pass_ != Pass::kNone) return;
  if (listener_ != nullptr && !mirrored_) {
    step_.clear();
    listener_->on_step(is_recorded);
  }
  pass_ = Pass::kForward;
}

void UnitTree::accept_whole() {
  are_whole_refused_ = false;
  for (const auto& unit : units()) {
    for (const auto& group : unit->groups_) group->gradients().accept_whole();
  }
}

void UnitTree::enter_backward() {
  if (pass_ == Pass::kBackward) return;
  pass_ = Pass::kBackward;
  current_ = TouchOrder::kNone;
  auto order = forward_order_.order();
  std::reverse(order.begin(), order.end());
  backward_order_.expect(order);
  turns_.clear();
  for (const auto number : order) {
    const auto unit = unit_at(number);
    const bool waits = unit && unit->is_used_ && unit->settings_.reduce_scatter_unused_params;
    if (waits && std::find(turns_.begin(), turns_.end(), number) == turns_.end()) turns_.push_back(number);
  }
  const auto token = mirrored_ ? mirrored_ : std::make_shared<int>();
  backward_ = token;
  if (mirrored_) return;
  torch::autograd::Engine::get_default_engine().queue_callback([tree = weak_from_this(), token] {
    if (const auto alive = tree.lock()) alive->end_backward();
  });
}

void UnitTree::begin_operator(Unit& unit, const OperatorCall& call, c10::ArrayRef<TouchedTensor> touched) {
  const std::lock_guard lock(mutex_);
  const bool is_recorded = at::GradMode::is_enabled();
  const at::NoGradGuard no_grad;
  TORCH_CHECK(!unit.is_summoned_ || is_harmless(call.name()), unit.who(), ": ", call.name(),
              " uses a parameter that is not whole here: summoned with rank0_only, or a view of it from before ",
              "summon_full_params(). Use the module's own parameters there, on rank 0.");
  if (unit.is_summoned_) return;
  check_access(unit, call, touched);
  TORCH_CHECK(unit.module_count() == 1 || !unit.is_root(), unit.who(),
              " is of several modules, which needs a root: ", "call fully_shard() for the module that holds them.");
  const bool is_in_context = is_recorded ? is_in_autograd_context() : is_context_backward();
  TORCH_CHECK(!is_in_context, unit.who(), " is in a context of distributed autograd, where gradients are not in .grad ",
              "and nobody would divide and average them. Run its forward and backward outside of the context, or wrap ",
              "this module by DistributedDataParallel.");
  // What Join throws at the beginning of a step it throws on all ranks, which go on with the group.
  if (listener_ != nullptr) enter_pass(is_recorded);
  or_refuse(unit, [&] { touch(unit, is_recorded); });
  note({.kind = StepEvent::Kind::kTouch,
        .unit = unit.number_,
        .is_recorded = is_recorded,
        .is_backward = pass_ == Pass::kBackward});
}

void UnitTree::touch(Unit& unit, bool is_recorded) {
  enter_pass(is_recorded);
  is_started_ = true;
  order().touch(unit.number_);
  if (late_error_) std::rethrow_exception(std::exchange(late_error_, nullptr));
  const bool is_next = std::exchange(current_, unit.number_) != unit.number_;
  if (is_next) free_others(unit);
  if (pass_ == Pass::kForward && unit.memory_ == Unit::Memory::kWhole) {
    for (const auto& group : unit.groups_) {
      if (is_next || group->has_changed_requires_grad()) group->follow_requires_grad();
    }
  }
  if (is_next && pass_ == Pass::kBackward) {
    take_step(unit, pass_, "pre_backward", [&] { prepare(unit, is_recorded); });
  } else {
    prepare(unit, is_recorded);
  }
  ++unit.users_;  // only if nothing has thrown: else nobody tells of the operator's end
}

void UnitTree::prepare(Unit& unit, bool is_recorded) {
  check_unchanged(unit);
  follow_precision(unit);
  make_whole(unit);
  if (is_recorded && pass_ == Pass::kForward) unit.is_used_ = unit.is_trained_ = true;
  if (pass_ == Pass::kForward || unit.options_.backward_prefetch == BackwardPrefetch::kBackwardPre) prefetch(unit);
}

void UnitTree::end_operator(Unit& unit) noexcept {
  const std::lock_guard lock(mutex_);
  if (unit.is_summoned_ || unit.users_ == 0) return;
  note({.kind = StepEvent::Kind::kEndOperator, .unit = unit.number_});
  if (--unit.users_ > 0 || !order().is_run_over()) return;
  const auto next = unit_at(order().next());
  if (next && (next.get() == &unit || next->is_inside(unit))) return;
  if (!may_free(unit)) return;
  try {
    free(unit);
  } catch (...) {
    late_error_ = std::current_exception();
  }
}

void UnitTree::check_unchanged(Unit& unit) {
  // Of any forward: its graph may have been retained. What a backward's hooks evaluate may be another model.
  const bool is_for_graph = pass_ == Pass::kBackward && unit.is_trained_;
  if (unit.memory_ == Unit::Memory::kSharded && !is_for_graph) return;
  const auto* name = changed_parameter(unit);
  if (name == nullptr) return;
  TORCH_CHECK(!is_for_graph, unit.who(), ": the shard of parameter '", *name,
              "' was changed between forward and backward, which needs the values of the forward. Step or load after ",
              "the backward.");
  // Whole since an earlier forward, and a step or a load came in between.
  if (unit.memory_ == Unit::Memory::kGathering) make_whole(unit);
  free(unit);
}

void UnitTree::make_whole(Unit& unit) {
  if (unit.memory_ == Unit::Memory::kSharded) launch_gather(unit);
  if (unit.memory_ == Unit::Memory::kGathering) {
    unit.memory_ = Unit::Memory::kWhole;
    whole_.push_back(unit.number_);
    for (const auto& group : unit.groups_) {
      group->wait_for_gather();
      take_step(*group, pass_, "gather_copy_out", [&] { group->finish_gather(); });
    }
  }
}

void UnitTree::launch_gather(Unit& unit) {
  if (unit.is_summoned_) return;
  if (!is_order_known_ && is_debugging()) check_order(unit);
  if (const auto event = std::exchange(post_optim_event_, std::nullopt)) {
    event->block(current_stream(event->device()));
  }
  follow_precision(unit);
  const bool for_backward = pass_ == Pass::kBackward && unit.is_used_;
  if (for_backward) check_unchanged(unit);  // gathered ahead: then nobody would see it any more
  take_step(unit, pass_, "unshard", [&] {
    for (const auto& group : unit.groups_) group->launch_gather(pass_, for_backward);
  });
  unit.memory_ = Unit::Memory::kGathering;
}

void UnitTree::follow_precision(Unit& unit) {
  if (pass_ == Pass::kBackward || !unit.options_.mp_policy.full_precision_in_eval) return;
  const bool is_full = unit.wants_full_precision();
  if (unit.is_full_precision_ == is_full) return;
  TORCH_CHECK(!unit.is_used_, unit.who(),
              ": its module was switched between training and evaluation, which is in full ",
              "precision, between a forward that recorded gradients and its backward. Run the backward first, forward ",
              "under NoGradGuard, or call reset_iter_state().");
  if (unit.memory_ == Unit::Memory::kGathering) make_whole(unit);
  free(unit);
  unit.is_full_precision_ = is_full;
  for (const auto& group : unit.groups_) group->set_full_precision(is_full);
}

void UnitTree::check_order(const Unit& unit) const {
  const auto group = unit.mesh_.get_group(unit.mesh_.ndim() - 1);
  const LabelScope label({"the order of FSDP's units"});
  const auto names = all_gather_object(unit.name_, group);
  for (std::size_t rank = 0; rank < names.size(); ++rank) {
    TORCH_CHECK(names[rank] == unit.name_, unit.who(), " is gathered here, and unit '", names[rank], "' on rank ", rank,
                " of the group. All ranks run units in the same order.");
  }
}

void UnitTree::free(Unit& unit) {
  if (unit.memory_ != Unit::Memory::kWhole || unit.users_ > 0 || unit.is_summoned_) return;
  const bool is_reduced = pass_ == Pass::kBackward && syncs(unit);
  const bool is_needed_again = (pass_ == Pass::kForward && unit.is_used_) || (unit.options_.keep_parts && !is_reduced);
  take_step(unit, pass_, "reshard", [&] {
    for (const auto& group : unit.groups_) {
      take_step(*group, pass_, "free", [&] { is_needed_again ? group->free_until_backward() : group->free(); });
    }
  });
  unit.memory_ = Unit::Memory::kSharded;
  std::erase(whole_, unit.number_);
}

bool UnitTree::frees_after_backward(const Unit& unit) const {
  // The next forward of an accumulation has the same values.
  const bool is_kept_whole = !syncs(unit) && unit.settings_.reshard_after_forward == false;
  return unit.settings_.reshard_after_backward && !is_kept_whole;
}

bool UnitTree::may_free(const Unit& unit) const {
  if (pass_ == Pass::kBackward) return frees_after_backward(unit) && unit.is_done_;
  const bool is_next_in_backward = unit.is_used_ && order().next() == TouchOrder::kNone && order().is_run_over() &&
                                   backward_order_.first() == unit.number_;
  return unit.settings_.reshard_after_forward.value_or(!unit.is_root() && !is_next_in_backward);
}

void UnitTree::free_others(const Unit& unit) {
  for (const auto number : std::vector(whole_)) {
    const auto other = unit_at(number);
    if (!other || other.get() == &unit || unit.is_inside(*other)) continue;
    if (may_free(*other)) free(*other);
  }
}

void UnitTree::prefetch(const Unit& unit) {
  const bool is_backward = pass_ == Pass::kBackward;
  const auto gather = [&](const UnitPtr& next) {
    if (!next || next->memory_ != Unit::Memory::kSharded || next->groups_.empty()) return;
    if (is_backward && !next->settings_.unshard_in_backward) return;
    launch_gather(*next);
  };
  const auto& chosen = is_backward ? unit.settings_.backward_prefetch : unit.settings_.forward_prefetch;
  if (chosen) {
    for (const auto& next : *chosen) gather(next.lock());
    return;
  }
  if (!is_backward && !unit.options_.forward_prefetch) return;
  if (unit.options_.limit_all_gathers) return gather(unit_at(order().next()));
  for (const auto number : order().upcoming()) gather(unit_at(number));
}

void UnitTree::on_gradient(Unit& unit, const at::Tensor& parameter) {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(!unit.is_summoned_, unit.who(), ": a backward inside of a summon_full_params() scope. Its gradients ",
              "would be lost: close the scope first.");
  or_refuse(unit, [&] { gradient_arrived(unit); });
  if (listener_ == nullptr) return;
  std::size_t index = 0;
  for_each_handle(unit, [&](const WholeHandle& handle, std::size_t number) {
    if (handle.tensor().is_same(parameter)) index = number;
  });
  note({.kind = StepEvent::Kind::kGradient, .unit = unit.number_, .handle = index});
}

void UnitTree::gradient_arrived(Unit& unit) {
  enter_pass(/*is_recorded=*/false);
  ++unit.arrived_;
  std::size_t trainable = 0;
  std::size_t all = 0;
  for (const auto& group : unit.groups_) {
    all += group->handle_count();
    trainable += group->trainable_count();
  }
  if (unit.arrived_ < trainable) return;
  unit.is_done_ = true;
  take_step(unit, pass_, "post_backward_node", [&] {
    reduce_in_turn(unit);
    // Frozen ones may be needed still, by what comes before them.
    if (all == trainable && frees_after_backward(unit)) free(unit);
    if (unit.options_.backward_prefetch == BackwardPrefetch::kBackwardPost) prefetch(unit);
  });
}

void UnitTree::reduce_in_turn(Unit& unit) {
  const auto turn = std::find(turns_.begin(), turns_.end(), unit.number_);
  if (turn == turns_.end()) return reduce(unit);
  while (!turns_.empty()) {
    const auto next = unit_at(turns_.front());
    if (next && !next->is_done_) return;
    turns_.erase(turns_.begin());
    if (next) reduce(*next);
  }
}

double UnitTree::divisor_of(const Unit& unit) const {
  if (weight_of_all_ > 0) return weight_of_all_;
  if (listener_ != nullptr) {
    if (const auto divisor = listener_->divisor(); divisor > 0) return divisor;
  }
  return unit.settings_.gradient_divide_factor;
}

void UnitTree::reduce(Unit& unit) {
  unit.arrived_ = 0;
  take_step(unit, pass_, "post_backward", [&] { reduce_now(unit); });
}

void UnitTree::reduce_now(Unit& unit) {
  TORCH_CHECK(listener_ == nullptr || syncs(unit), unit.who(), ": a backward without gradient sync inside of a Join ",
              "scope, where ranks that ran out of inputs could not tell. Reduce in every iteration there.");
  if (!syncs(unit)) {
    for (const auto& group : unit.groups_) group->gradients().keep(!is_weightless_);
    return;
  }
  if (weight_so_far_ != 0 && !has_kept()) weight_so_far_ = 0;  // zeroed since
  TORCH_CHECK(weight_so_far_ == 0, unit.who(), ": gradients of backward(loss, weight) under no_sync() wait to be ",
              "averaged: end with backward(loss, weight) as well, not with loss.backward().");
  const auto& settings = unit.settings_;
  const ReductionSettings how{
      .divisor = divisor_of(unit),
      .sums_replicas = settings.requires_all_reduce,
      .sends_zeros = settings.reduce_scatter_unused_params,
      .counts = !is_weightless_,
      .on_reduced = settings.all_reduce_hook,
      .on_reduced_stream = settings.all_reduce_hook_stream,
  };
  for (auto group = unit.groups_.rbegin(); group != unit.groups_.rend(); ++group) (*group)->gradients().launch(how);
  reducing_.push_back(unit.shared_from_this());
  finish_reductions(reductions_in_flight_);
}

void UnitTree::finish_reductions(std::size_t left) {
  while (reducing_.size() > left) {
    const auto unit = reducing_.front();
    reducing_.erase(reducing_.begin());
    for (const auto& group : unit->groups_) group->gradients().finish_scatter();
    const auto before = std::exchange(replicating_, unit);
    if (!before) continue;
    for (const auto& group : before->groups_) group->gradients().finish_replicas();
  }
}

void UnitTree::end_backward() {
  const std::lock_guard lock(mutex_);
  const at::NoGradGuard no_grad;
  if (late_error_) std::rethrow_exception(std::exchange(late_error_, nullptr));
  const auto all = units();
  // Those with parameters that nothing used: what has arrived is reduced, in an order all ranks have.
  for (const auto number : std::exchange(turns_, {})) {
    if (const auto unit = unit_at(number)) reduce(*unit);
  }
  for (const auto& unit : all) {
    bool is_left = unit->arrived_ > 0;
    for (const auto& group : unit->groups_) is_left = is_left || (syncs(*unit) && group->gradients().has_kept());
    if (is_left) or_refuse(*unit, [&] { reduce(*unit); });
  }
  weight_of_all_ = 0;
  is_weightless_ = false;
  if (listener_ != nullptr) check_zeroed();
  // Walks the module tree: now and then.
  ++backwards_;
  if ((backwards_ & (backwards_ - 1)) == 0) check_registered();
  if (is_last_backward_) {
    finish_reductions(0);
    if (const auto last = std::exchange(replicating_, nullptr)) {
      for (const auto& group : last->groups_) group->gradients().finish_replicas();
    }
    for (const auto& unit : all) {
      take_step(*unit, pass_, "hand_out", [&] {
        for (const auto& group : unit->groups_) group->gradients().hand_out();
      });
    }
    for (const auto& unit : all) {
      take_step(*unit, pass_, "finish_copies", [&] {
        for (const auto& group : unit->groups_) group->gradients().finish_copies();
      });
    }
  } else {
    for (const auto& unit : all) {
      for (const auto& group : unit->groups_) group->gradients().leave_launched();
    }
  }
  for (const auto& unit : all) {
    for (const auto& group : unit->groups_) group->gradients().refuse_whole();
  }
  are_whole_refused_ = true;
  for (const auto& unit : all) {
    rest(*unit, frees_after_backward(*unit));
    // A step comes next, though shards of no elements do not show it.
    for (const auto& group : unit->groups_) {
      if (syncs(*unit)) group->drop_parts();
    }
  }
  end_passes();
  note({.kind = StepEvent::Kind::kEndBackward});
  if (!mirrored_) last_step_ = std::exchange(step_, {});
}

void UnitTree::rest(Unit& unit, bool is_freed) {
  // What was gathered early, and not needed.
  if (unit.memory_ == Unit::Memory::kGathering) make_whole(unit);
  unit.is_used_ = false;
  if (is_freed) free(unit);
  unit.arrived_ = 0;
  unit.is_done_ = false;
}

void UnitTree::end_passes() {
  const bool is_changed = forward_order_.end_pass();
  backward_order_.end_pass();
  if (is_order_known_ && is_changed && is_debugging() && !std::exchange(has_warned_of_order_, true)) {
    const auto root = units_.back().lock();
    TORCH_WARN(root ? root->who() : "[lockstep/fsdp]", ": units ran in another order than in the step before. Results ",
               "are right, but units are gathered late. Later changes are not told.");
  }
  is_order_known_ = true;
  pass_ = Pass::kNone;
  current_ = TouchOrder::kNone;
}

void UnitTree::forget_step() {
  late_error_ = nullptr;
  reducing_.clear();
  replicating_.reset();
  turns_.clear();
  weight_so_far_ = 0;
  weight_of_all_ = 0;
  is_weightless_ = false;
  for (const auto& unit : units()) {
    unit->users_ = 0;
    for (const auto& group : unit->groups_) group->gradients().drop();
    rest(*unit, /*is_freed=*/true);
  }
  end_passes();
}

void UnitTree::reset() {
  const std::lock_guard lock(mutex_);
  forget_step();
}

bool UnitTree::is_idle() const {
  const std::lock_guard lock(mutex_);
  return !is_backward_running();
}

void UnitTree::unshard(Unit& unit, bool is_async) {
  const std::lock_guard lock(mutex_);
  if (unit.groups_.empty()) return;
  if (unit.memory_ == Unit::Memory::kSharded) launch_gather(unit);
  if (!is_async) make_whole(unit);
}

void UnitTree::reshard(Unit& unit) {
  const std::lock_guard lock(mutex_);
  if (unit.memory_ == Unit::Memory::kGathering) make_whole(unit);
  free(unit);
}

void UnitTree::begin_no_sync() {
  const std::lock_guard lock(mutex_);
  ++no_syncs_;
}

void UnitTree::end_no_sync() {
  const std::lock_guard lock(mutex_);
  --no_syncs_;
}

void UnitTree::set_is_last_backward(bool is_last) {
  const std::lock_guard lock(mutex_);
  is_last_backward_ = is_last;
}

void UnitTree::set_reductions_in_flight(std::size_t count) {
  const std::lock_guard lock(mutex_);
  reductions_in_flight_ = count;
}

void UnitTree::set_post_optim_event(c10::Event event) {
  const std::lock_guard lock(mutex_);
  post_optim_event_ = std::move(event);
}

bool UnitTree::has_kept() {
  bool is_found = false;
  for (const auto& unit : units()) {
    for (const auto& group : unit->groups_) {
      group->gradients().forget_zeroed();
      is_found = is_found || group->gradients().has_kept();
    }
  }
  return is_found;
}

void UnitTree::backward(const at::Tensor& loss, double weight) {
  const auto root = units_.back().lock();
  TORCH_CHECK(root, "[lockstep/fsdp] the root is gone");
  TORCH_CHECK(weight >= 0 && std::isfinite(weight), root->who(), ": a weight of ", weight,
              " was given: it cannot be negative and must be finite.");
  {
    const std::lock_guard lock(mutex_);
    if (!has_kept()) weight_so_far_ = 0;
    is_weightless_ = weight == 0;
    weight_so_far_ += weight;
    if (syncs(*root)) {
      add_weights(*root, std::exchange(weight_so_far_, 0), loss.device());
      note({.kind = StepEvent::Kind::kWeights});
    }
  }
  try {
    (loss * weight).backward();
  } catch (...) {
    reset();
    throw;
  }
}

void UnitTree::add_weights(const Unit& root, double weight, at::Device device) {
  weight_of_all_ = sum_over(root.mesh_, weight, device);
  TORCH_CHECK(weight_of_all_ > 0, root.who(), ": the weights of all ranks are zero: there is nothing to average.");
}

bool UnitTree::has_written_shards() const {
  const std::lock_guard lock(mutex_);
  const auto all = units();
  return std::any_of(all.begin(), all.end(), [](const UnitPtr& unit) { return changed_parameter(*unit) != nullptr; });
}

void UnitTree::check_registered() const {
  const auto root = units_.back().lock();
  const auto module = root ? root->module() : nullptr;
  if (!module || root->mesh_.size() == 1) return;
  std::unordered_set<const void*> known;
  for (const auto& unit : units()) {
    for (const auto& ignored : unit->options_.ignored_params) known.insert(ignored.unsafeGetTensorImpl());
    for (const auto& ignored : unit->options_.ignored_modules) {
      for (const auto& parameter : ignored->parameters()) known.insert(parameter.unsafeGetTensorImpl());
    }
  }
  for (const auto& item : module->named_parameters()) {
    const auto& parameter = item.value();
    if (!parameter.grad().defined() || has_gathered_layout(parameter) ||
        known.contains(parameter.unsafeGetTensorImpl()))
      continue;
    or_refuse(*root, [&] {
      TORCH_CHECK(false, root->who(), ": parameter '", item.key(), "' was registered after fully_shard(), and has a ",
                  "gradient that nobody averages: ranks would train it differently. Register it before, or shard its ",
                  "module before its root.");
    });
  }
}

void UnitTree::begin_summon(Unit& unit) {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(!is_backward_running(), unit.who(),
              ": summon_full_params() inside of a backward. Open it between steps.");
  TORCH_CHECK(!unit.is_summoned_, unit.who(), ": summon_full_params() inside of another one. One scope is enough.");
  if (unit.memory_ == Unit::Memory::kGathering) make_whole(unit);
  free(unit);
  for (const auto& group : unit.groups_) {
    group->gradients().accept_whole();
    group->drop_parts();  // what is written is of some ranks' shards only, and parts are out of date on all
  }
  unit.is_summoned_ = true;
}

void UnitTree::end_summon(Unit& unit) noexcept {
  const std::lock_guard lock(mutex_);
  unit.is_summoned_ = false;
}

}  // namespace lockstep::detail
