#include "lockstep/fsdp/unit.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <utility>

#include "lockstep/base/str.h"
#include "lockstep/intercept/operator_call.h"

namespace lockstep::detail {
namespace {

// A reduction is on its way while the next unit's backward runs.
constexpr std::size_t kReductionsInFlight = 1;

/// Lives with the whole parameter, which must not keep the unit alive.
class GradientArrived final : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit GradientArrived(std::weak_ptr<Unit> unit) : unit_(std::move(unit)) {}

  void operator()(const at::Tensor& /*parameter*/) override {
    if (const auto unit = unit_.lock()) unit->tree().on_gradient(*unit);
  }

 private:
  const std::weak_ptr<Unit> unit_;
};

bool is_backward_running() {
  return torch::autograd::get_current_graph_task_id() >= 0;
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

}  // namespace

Unit::Unit(const std::shared_ptr<torch::nn::Module>& module, FullyShardOptions options, DeviceMesh mesh)
    : module_(module), name_(module->name()), options_(std::move(options)), mesh_(std::move(mesh)) {}

void Unit::shard(const std::vector<WholeParameter>& parameters) {
  std::vector<std::pair<at::ScalarType, std::vector<WholeParameter>>> by_dtype;
  for (const auto& each : parameters) {
    const auto dtype = each.tensor.scalar_type();
    auto found = std::find_if(by_dtype.begin(), by_dtype.end(), [&](const auto& some) { return some.first == dtype; });
    if (found == by_dtype.end()) found = by_dtype.insert(found, {dtype, {}});
    found->second.push_back(each);
  }
  for (const auto& [dtype, some] : by_dtype) {
    groups_.push_back(std::make_unique<ParameterGroup>(some, mesh_, options_.mp_policy, shared_from_this(), name_));
    for (const auto& each : some) {
      torch::autograd::impl::set_post_acc_grad_hooks(each.tensor, std::make_unique<GradientArrived>(weak_from_this()));
    }
  }
}

void Unit::before_operator(const OperatorCall& call, c10::ArrayRef<TouchedTensor> touched) {
  tree_->begin_operator(*this, call, touched);
}

void Unit::after_operator(const OperatorCall& /*call*/) noexcept {
  tree_->end_operator(*this);
}

bool Unit::is_inside(const Unit& other) const {
  for (auto above = parent_.lock(); above; above = above->parent_.lock()) {
    if (above.get() == &other) return true;
  }
  return false;
}

std::string Unit::who() const {
  const auto rank = mesh_.get_rank();
  return str("[lockstep/fsdp] rank ", rank, ": unit '", name_, "'");
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
      for (std::size_t i = 0; i < group->count(); ++i) {
        TORCH_CHECK(storage_of(group->whole(i)) != storage_of(each.tensor), unit.who(), ": ", call.name(),
                    " writes to parameter '", group->name(i),
                    "', which is whole only while it is used: the change would be lost. Change the ",
                    "shard in parameters(), or open a summon_full_params() scope.");
      }
    }
  }
}

void UnitTree::enter_pass() {
  const bool has_thrown = pass_ == Pass::kBackward && backward_.expired();
  if (has_thrown) forget_step();
  if (is_backward_running()) return enter_backward();
  if (pass_ == Pass::kNone) pass_ = Pass::kForward;
}

void UnitTree::enter_backward() {
  if (pass_ == Pass::kBackward) return;
  pass_ = Pass::kBackward;
  current_ = TouchOrder::kNone;
  auto order = forward_order_.order();
  std::reverse(order.begin(), order.end());
  backward_order_.expect(order);
  const auto token = std::make_shared<int>();
  backward_ = token;
  torch::autograd::Engine::get_default_engine().queue_callback([tree = weak_from_this(), token] {
    if (const auto alive = tree.lock()) alive->end_backward();
  });
}

void UnitTree::begin_operator(Unit& unit, const OperatorCall& call, c10::ArrayRef<TouchedTensor> touched) {
  const std::lock_guard lock(mutex_);
  const bool is_recorded = at::GradMode::is_enabled();
  const at::NoGradGuard no_grad;
  if (unit.is_summoned_) return;
  check_access(unit, call, touched);
  enter_pass();
  is_started_ = true;
  order().touch(unit.number_);
  if (std::exchange(current_, unit.number_) != unit.number_) free_others(unit);
  check_unchanged(unit);
  make_whole(unit);
  if (is_recorded && pass_ == Pass::kForward) unit.is_used_ = true;
  prefetch();
  ++unit.users_;  // only if nothing has thrown: else nobody tells of the operator's end
}

void UnitTree::end_operator(Unit& unit) noexcept {
  const std::lock_guard lock(mutex_);
  if (unit.is_summoned_ || unit.users_ == 0) return;
  if (--unit.users_ > 0 || !order().is_run_over()) return;
  const auto next = unit_at(order().next());
  if (next && (next.get() == &unit || next->is_inside(unit))) return;
  if (may_free(unit)) free(unit);
}

void UnitTree::check_unchanged(Unit& unit) {
  if (unit.memory_ == Unit::Memory::kSharded && !(pass_ == Pass::kBackward && unit.is_used_)) return;
  const auto* name = changed_parameter(unit);
  if (name == nullptr) return;
  TORCH_CHECK(pass_ != Pass::kBackward || !unit.is_used_, unit.who(), ": the shard of parameter '", *name,
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
    for (const auto& group : unit.groups_) group->finish_gather();
  }
}

void UnitTree::launch_gather(Unit& unit) {
  for (const auto& group : unit.groups_) group->launch_gather();
  unit.memory_ = Unit::Memory::kGathering;
}

void UnitTree::free(Unit& unit) {
  if (unit.memory_ != Unit::Memory::kWhole || unit.users_ > 0 || unit.is_summoned_) return;
  for (const auto& group : unit.groups_) group->free();
  unit.memory_ = Unit::Memory::kSharded;
}

bool UnitTree::may_free(const Unit& unit) const {
  if (pass_ == Pass::kBackward) return unit.reshard_after_backward_ && unit.is_done_;
  return unit.reshard_after_forward_.value_or(!unit.is_root());
}

void UnitTree::free_others(const Unit& unit) {
  for (const auto& other : units()) {
    if (other.get() == &unit || unit.is_inside(*other)) continue;
    if (other->memory_ == Unit::Memory::kWhole && may_free(*other)) free(*other);
  }
}

void UnitTree::prefetch() {
  const auto next = unit_at(order().next());
  if (next && next->memory_ == Unit::Memory::kSharded && !next->groups_.empty()) launch_gather(*next);
}

void UnitTree::on_gradient(Unit& unit) {
  const std::lock_guard lock(mutex_);
  enter_pass();
  ++unit.arrived_;
  std::size_t trainable = 0;
  std::size_t all = 0;
  for (const auto& group : unit.groups_) {
    all += group->count();
    trainable += group->trainable_count();
  }
  if (unit.arrived_ < trainable) return;
  unit.is_done_ = true;
  reduce(unit);
  // Frozen ones may be needed still, by what comes before them.
  if (all == trainable && unit.reshard_after_backward_) free(unit);
}

void UnitTree::reduce(Unit& unit) {
  unit.arrived_ = 0;
  if (!unit.requires_gradient_sync_) return;
  int64_t ranks = 1;
  for (const auto size : unit.mesh_.shape()) ranks *= size;
  const auto factor = divide_factor_ > 0 ? divide_factor_ : static_cast<double>(ranks);
  for (const auto& group : unit.groups_) group->launch_reduction(1 / factor);
  reducing_.push_back(unit.shared_from_this());
  finish_reductions(kReductionsInFlight);
}

void UnitTree::finish_reductions(std::size_t left) {
  while (reducing_.size() > left) {
    const auto unit = reducing_.front();
    reducing_.erase(reducing_.begin());
    for (const auto& group : unit->groups_) {
      while (group->is_reducing()) group->finish_reduction();
    }
  }
}

void UnitTree::end_backward() {
  const std::lock_guard lock(mutex_);
  const at::NoGradGuard no_grad;
  const auto all = units();
  // Those with parameters that nothing used: what has arrived is reduced, in an order all ranks have.
  for (const auto& unit : all) {
    if (unit->arrived_ > 0) reduce(*unit);
  }
  finish_reductions(0);
  for (const auto& unit : all) {
    for (const auto& group : unit->groups_) group->hand_out_gradients();
    rest(*unit, unit->reshard_after_backward_);
  }
  end_passes();
}

void UnitTree::rest(Unit& unit, bool is_freed) {
  // What was gathered early, and not needed.
  if (unit.memory_ == Unit::Memory::kGathering) make_whole(unit);
  if (is_freed) free(unit);
  unit.arrived_ = 0;
  unit.is_used_ = false;
  unit.is_done_ = false;
}

void UnitTree::end_passes() {
  forward_order_.end_pass();
  backward_order_.end_pass();
  pass_ = Pass::kNone;
  current_ = TouchOrder::kNone;
}

void UnitTree::forget_step() {
  reducing_.clear();
  for (const auto& unit : units()) {
    unit->users_ = 0;
    for (const auto& group : unit->groups_) group->drop_gradients();
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

void UnitTree::set_requires_gradient_sync(Unit& unit, bool is_on, bool recurse) {
  const std::lock_guard lock(mutex_);
  for (const auto& each : below(unit, recurse)) each->requires_gradient_sync_ = is_on;
}

void UnitTree::set_reshard_after_forward(Unit& unit, bool is_on, bool recurse) {
  const std::lock_guard lock(mutex_);
  for (const auto& each : below(unit, recurse)) each->reshard_after_forward_ = is_on;
}

void UnitTree::set_reshard_after_backward(Unit& unit, bool is_on, bool recurse) {
  const std::lock_guard lock(mutex_);
  for (const auto& each : below(unit, recurse)) each->reshard_after_backward_ = is_on;
}

void UnitTree::set_gradient_divide_factor(double factor) {
  const std::lock_guard lock(mutex_);
  divide_factor_ = factor;
}

void UnitTree::summon(Unit& unit) {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(!is_backward_running() && unit.users_ == 0, unit.who(),
              ": summon_full_params() inside of forward or backward. Open it between steps.");
  TORCH_CHECK(!unit.options_.mp_policy.param_dtype, unit.who(), ": summon_full_params() would show parameters in ",
              *unit.options_.mp_policy.param_dtype, " and lose what that cannot hold. Change the shards in ",
              "parameters() instead.");
  TORCH_CHECK(!unit.is_summoned_, unit.who(), ": summon_full_params() inside of another one. One scope is enough.");
  if (unit.memory_ != Unit::Memory::kSharded) {
    make_whole(unit);
    if (changed_parameter(unit) != nullptr) free(unit);
  }
  make_whole(unit);
  unit.is_summoned_ = true;
}

void UnitTree::end_summon(Unit& unit, bool writeback) {
  const std::lock_guard lock(mutex_);
  unit.is_summoned_ = false;
  if (writeback) {
    for (const auto& group : unit.groups_) group->write_back();
  }
  free(unit);
}

}  // namespace lockstep::detail
