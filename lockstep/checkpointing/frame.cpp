#include "lockstep/checkpointing/frame.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "lockstep/base/str.h"
#include "lockstep/intercept/key.h"
#include "lockstep/intercept/operator_call.h"

namespace lockstep::detail {
namespace {

using torch::autograd::SavedVariableHooks;

/// Ends a recomputation. No std::exception, which functions may catch.
struct StopRecomputation {};

enum class EarlyStop { kAsOptions, kOff, kOn };
thread_local auto early_stop_scope = EarlyStop::kAsOptions;

CheckpointOptions decided(CheckpointOptions options) {
  if (early_stop_scope != EarlyStop::kAsOptions) options.early_stop = early_stop_scope == EarlyStop::kOn;
  return options;
}

constexpr const char* kRemedy =
    " The function must do the same when it runs again: it may depend on something that has changed since, a counter "
    "or a random number of its own. CheckpointOptions::debug lists the operators of both runs.";

}  // namespace

class OperatorLog final : public OperatorScope {
 public:
  OperatorLog() : OperatorScope(Sees::kLeaves) {}

  void on_operator(OperatorCall& call) override {
    {
      const std::lock_guard lock(mutex_);
      names_.push_back(call.name());
    }
    call.proceed();
  }
  std::size_t size() const {
    const std::lock_guard lock(mutex_);
    return names_.size();
  }
  std::vector<std::string> names() const {
    const std::lock_guard lock(mutex_);
    return names_;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::string> names_;
};

/// In the place of a tensor that forward would have saved.
class CheckpointFrame::Dropped final : public SavedVariableHooks {
 public:
  explicit Dropped(std::shared_ptr<CheckpointFrame> frame) : frame_(std::move(frame)) {}
  ~Dropped() override {
    if (slot_) frame_->forget(*slot_);
  }
  Dropped(const Dropped&) = delete;
  Dropped& operator=(const Dropped&) = delete;

  void call_pack_hook(const at::Tensor& tensor) override { slot_ = frame_->add_slot(tensor); }
  at::Tensor call_unpack_hook() override { return frame_->fetch(*slot_); }

 private:
  const std::shared_ptr<CheckpointFrame> frame_;
  std::optional<std::size_t> slot_;
};

class CheckpointFrame::DroppingRule final : public SavingRule {
 public:
  explicit DroppingRule(std::shared_ptr<CheckpointFrame> frame) : frame_(std::move(frame)) {}
  std::unique_ptr<SavedVariableHooks> hooks() override { return std::make_unique<Dropped>(frame_); }

 private:
  const std::shared_ptr<CheckpointFrame> frame_;
};

/// What running again saves: it goes to the frame, and stays here for a backward inside of the function.
class CheckpointFrame::Recomputed final : public SavedVariableHooks {
 public:
  Recomputed(std::weak_ptr<CheckpointFrame> frame, std::shared_ptr<Round*> round)
      : frame_(std::move(frame)), round_(std::move(round)) {}

  void call_pack_hook(const at::Tensor& tensor) override {
    tensor_ = tensor.tensor_data();
    const auto frame = frame_.lock();
    if (frame && *round_ != nullptr) frame->add_recomputed(**round_, tensor_);
  }
  at::Tensor call_unpack_hook() override { return tensor_; }

 private:
  const std::weak_ptr<CheckpointFrame> frame_;
  const std::shared_ptr<Round*> round_;  // null when the run is over
  at::Tensor tensor_;
};

class CheckpointFrame::RecomputingRule final : public SavingRule {
 public:
  RecomputingRule(std::weak_ptr<CheckpointFrame> frame, Round& round)
      : frame_(std::move(frame)), round_(std::make_shared<Round*>(&round)) {}
  std::unique_ptr<SavedVariableHooks> hooks() override { return std::make_unique<Recomputed>(frame_, round_); }
  void end() { *round_ = nullptr; }

 private:
  const std::weak_ptr<CheckpointFrame> frame_;
  const std::shared_ptr<Round*> round_;
};

CheckpointFrame::Geometry::Geometry(const at::Tensor& tensor)
    : sizes(tensor.is_nested() ? std::vector<int64_t>() : tensor.sizes().vec()),
      dtype(tensor.scalar_type()),
      device(tensor.device()) {}

std::string CheckpointFrame::Geometry::to_string() const {
  return lockstep::str(c10::toString(dtype), at::IntArrayRef(sizes), " on ", device);
}

CheckpointFrame::CheckpointFrame(const CheckpointOptions& options, const std::vector<at::Tensor>& tensors,
                                 CheckpointedRun::Recompute recompute)
    : options_(decided(options)),
      recompute_(std::move(recompute)),
      surroundings_(options, tensors),
      kept_(options.policy ? std::make_shared<KeptResults>(options.policy, options.allow_cache_entry_mutation)
                           : nullptr),
      log_(options.debug ? std::make_shared<OperatorLog>() : nullptr) {
  // Saved as autograd saves: a checkpoint around this one drops them too, and makes them again first. A sharded
  // parameter is touched before: what was written since the step before counts as a version when it is gathered.
  for (const auto& tensor : tensors) {
    if (tensor.defined() && is_marked_intercepted(tensor)) static_cast<void>(tensor.detach());
    inputs_.emplace_back(tensor, /*is_output=*/false);
  }
}

std::shared_ptr<SavingRule> CheckpointFrame::dropping() {
  return std::make_shared<DroppingRule>(shared_from_this());
}

std::shared_ptr<OperatorScope> CheckpointFrame::logging() const {
  return log_;
}

void CheckpointFrame::complete_forward() {
  const std::lock_guard lock(mutex_);
  is_complete_ = true;
}

std::size_t CheckpointFrame::add_slot(const at::Tensor& tensor) {
  const std::lock_guard lock(mutex_);
  const auto& versions = tensor.unsafeGetTensorImpl()->version_counter();
  slots_.push_back({.geometry = Geometry(tensor),
                    .versions = versions,
                    .version = versions.current_version(),
                    .position = log_ ? log_->size() : 0});
  return slots_.size() - 1;
}

void CheckpointFrame::forget(std::size_t slot) noexcept {
  std::vector<at::Tensor> gone;  // not under the lock
  const std::lock_guard lock(mutex_);
  slots_[slot].is_wanted = false;
  for (auto& [task, round] : rounds_) {
    if (slot < round.tensors.size()) gone.push_back(std::exchange(round.tensors[slot], at::Tensor()));
  }
}

at::Tensor CheckpointFrame::fetch(std::size_t slot) {
  const auto alive = shared_from_this();
  const std::lock_guard lock(mutex_);
  const int task = torch::autograd::get_current_graph_task_id();
  if (task < 0) {  // somebody looks at what a node has saved
    Round once;
    recompute(once, slot);
    check_version(slot);
    return once.tensors[slot];
  }
  auto& round = round_of(task);
  if (slot >= round.tensors.size() || !round.tensors[slot].defined()) {
    try {
      recompute(round, slot);
    } catch (...) {
      rounds_.erase(task);
      throw;
    }
  }
  check_version(slot);
  // Not needed any more, even if the graph stays: another backward makes it again.
  return std::exchange(round.tensors[slot], at::Tensor());
}

CheckpointFrame::Round& CheckpointFrame::round_of(int task) {
  const auto found = rounds_.find(task);
  if (found != rounds_.end()) return found->second;
  std::erase_if(rounds_, [](const auto& round) { return round.second.backward.expired(); });
  auto& round = rounds_[task];
  const auto token = std::make_shared<int>();
  round.backward = token;
  // What a backward did not fetch goes with it.
  torch::autograd::Engine::get_default_engine().queue_callback([frame = weak_from_this(), task, token] {
    const auto alive = frame.lock();
    if (!alive) return;
    const std::lock_guard lock(alive->mutex_);
    alive->rounds_.erase(task);
  });
  return round;
}

void CheckpointFrame::recompute(Round& round, std::size_t slot) {
  round.tensors.resize(slots_.size());
  round.wanted.assign(slots_.size(), false);
  round.wanted[slot] = true;
  for (std::size_t i = 0; i < slots_.size() && !round.is_complete; ++i) round.wanted[i] = slots_[i].is_wanted;
  round.last_wanted = slots_.size() - 1;
  while (!round.wanted[round.last_wanted]) --round.last_wanted;
  round.next = 0;
  round.differences.clear();

  std::vector<at::Tensor> inputs;
  for (const auto& input : inputs_) inputs.push_back(input.unpack());
  const auto log = options_.debug ? std::make_shared<OperatorLog>() : nullptr;
  const auto rule = std::make_shared<RecomputingRule>(weak_from_this(), round);
  bool has_stopped = false;
  {
    const Recomputing recomputing;
    const Surroundings::Again again(surroundings_);
    const auto context = options_.context_fn ? options_.context_fn(/*is_recompute=*/true) : nullptr;
    const EnterSaving saving(rule);
    std::optional<EnterScope> logged;
    if (log) logged.emplace(log);
    std::optional<EnterScope> replayed;
    if (kept_) replayed.emplace(kept_->replaying());
    try {
      recompute_(inputs);
    } catch (const StopRecomputation&) {
      has_stopped = true;
    } catch (...) {
      rule->end();
      throw;
    }
  }
  rule->end();
  check(round, has_stopped, log.get());
  round.is_complete = true;
}

void CheckpointFrame::add_recomputed(Round& round, const at::Tensor& tensor) {
  const std::lock_guard lock(mutex_);
  const auto slot = round.next++;
  if (slot >= slots_.size()) {
    // A backward inside of the function may come before forward has saved everything.
    TORCH_CHECK(!is_complete_, who(), ": more tensors are saved for backward than the ", slots_.size(),
                " of the first time.", kRemedy);
    return;
  }
  if (round.wanted[slot]) round.tensors[slot] = tensor;
  const Geometry now(tensor);
  if (options_.determinism_check != DeterminismCheck::kNone && now != slots_[slot].geometry) {
    round.differences.push_back(
        str("saved ", slots_[slot].geometry.to_string(), ", now ", now.to_string(), ": ", name_of(slot)));
  }
  if (options_.early_stop && slot >= round.last_wanted) throw StopRecomputation();
}

void CheckpointFrame::check(const Round& round, bool has_stopped, const OperatorLog* log) const {
  const auto logs = log == nullptr ? std::string()
                                   : str("\nOperators of forward: ", join(log_->names(), " "),
                                         "\nOperators when it ran again: ", join(log->names(), " "));
  TORCH_CHECK(has_stopped || !is_complete_ || round.next == slots_.size(), who(), ": ", round.next,
              " tensors are saved for backward, and ", slots_.size(), " the first time.", kRemedy, logs);
  TORCH_CHECK(round.differences.empty(), who(), ": tensors that are saved for backward are others than the first ",
              "time. ", join(round.differences, "; "), ".", kRemedy, logs);
}

void CheckpointFrame::check_version(std::size_t slot) const {
  // Autograd leaves this check to hooks where there are some.
  const auto& saved = slots_[slot];
  TORCH_CHECK(saved.versions.current_version() == saved.version, who(), ": one of the variables needed for gradient ",
              "computation has been modified by an inplace operation: ", name_of(slot), ", a ",
              saved.geometry.to_string(), ", is at version ", saved.versions.current_version(),
              ", but forward used version ", saved.version, ". Change it after backward, or change a clone of it.");
}

std::string CheckpointFrame::who() const {
  return str("[lockstep/checkpointing] a checkpointed ", options_.name.empty() ? "function" : options_.name,
             " that runs again");
}

std::string CheckpointFrame::name_of(std::size_t slot) const {
  const auto position = slots_[slot].position;
  const auto names = log_ ? log_->names() : std::vector<std::string>();
  const bool is_known = position > 0 && position <= names.size();
  return str("tensor ", slot, " of ", slots_.size(), is_known ? str(", of ", names[position - 1]) : "");
}

struct CheckpointedRun::Scopes {
  std::shared_ptr<void> context;
  std::optional<EnterSaving> dropping;
  std::optional<EnterScope> logged;
  std::optional<EnterScope> saved;
};

CheckpointedRun::CheckpointedRun(const CheckpointOptions& options, const std::vector<at::Tensor>& tensors,
                                 Recompute recompute)
    : frame_(std::make_shared<CheckpointFrame>(options, tensors, std::move(recompute))),
      scopes_(std::make_unique<Scopes>()) {
  if (options.context_fn) scopes_->context = options.context_fn(/*is_recompute=*/false);
  scopes_->dropping.emplace(frame_->dropping());
  if (auto log = frame_->logging()) scopes_->logged.emplace(std::move(log));
  if (auto saving = frame_->saving()) scopes_->saved.emplace(std::move(saving));
}

CheckpointedRun::~CheckpointedRun() {
  scopes_.reset();  // the innermost first
  frame_->complete_forward();
}

}  // namespace lockstep::detail

namespace lockstep {

SetCheckpointEarlyStop::SetCheckpointEarlyStop(bool is_enabled)
    : outer_(static_cast<int>(
          std::exchange(detail::early_stop_scope, is_enabled ? detail::EarlyStop::kOn : detail::EarlyStop::kOff))) {}

SetCheckpointEarlyStop::~SetCheckpointEarlyStop() {
  detail::early_stop_scope = static_cast<detail::EarlyStop>(outer_);
}

}  // namespace lockstep
