#include "lockstep/comm/pending.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/ivalue.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <condition_variable>
#include <vector>

#include "lockstep/base/observer.h"
#include "lockstep/base/rank_local.h"
#include "lockstep/base/str.h"
#include "lockstep/comm/failure.h"
#include "lockstep/comm/futures.h"
#include "lockstep/comm/interposer.h"

namespace lockstep {
namespace {

// How long a rank waits before it asks whether others have given up, and between asking again.
constexpr auto kPollInterval = std::chrono::milliseconds(100);

/// What has to be made up for: not every release of gloo averages, it coalesces CPU tensors only, and its
/// reduce-scatter has no future.
bool is_gloo(const c10d::Backend& backend) {
  return backend.getBackendName() == "gloo";
}

/// Backends whose ranks must be told by the store who is missing: gloo's errors do not say, and those of a group that
/// spans hosts say it on one host only. Our other backends' do, and NCCL's wait only enqueues.
bool needs_diagnosis(const c10d::Backend& backend) {
  return is_gloo(backend) || backend.getBackendName() == "hierarchical";
}

/// Set once; waited for in slices.
class Completion {
 public:
  void notify() {
    {
      const std::lock_guard lock(mutex_);
      is_done_ = true;
    }
    changed_.notify_all();
  }
  /// False if the time was over first.
  bool wait_for(std::chrono::milliseconds time) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, time, [&] { return is_done_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_done_ = false;
};

/// One call per tensor, in order; a call that takes one tensor by nature stays as it is.
std::vector<Call> split_by_tensor(const Call& call) {
  const bool is_in_place = call.kind == CallKind::kAllReduce;
  const bool is_single = call.kind == CallKind::kAllGatherSingle || call.kind == CallKind::kReduceScatterSingle;
  if (!is_in_place && !is_single) return {call};
  std::vector<Call> parts(call.inputs.size(), call);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    parts[i].inputs = {call.inputs[i]};
    if (is_single) parts[i].outputs = {call.outputs[i]};
  }
  return parts;
}

c10d::Backend& backend_for(const Call& call, const GroupPtr& group, const detail::GroupState& state) {
  if (call.kind == CallKind::kBarrier) return *group->getDefaultBackend();
  const auto device = call.subjects().at(0).device().type();
  // c10d keeps one backend of a kind it does not know; ours may be several.
  if (const auto found = state.backends.find(device); found != state.backends.end()) return *found->second;
  TORCH_CHECK(serves_device(group, device), "[lockstep/comm] ", state.who(), ": ", call.describe(), " on group '",
              state.description.name, "': the group has no backend for ", c10::DeviceTypeName(device, true),
              " tensors");
  return *group->getBackend(device);
}

Event event_of(const Call& call, const detail::GroupDescription& group, const char* state) {
  const auto& tensors = call.subjects();
  Event event;
  event.kind = name_of(call.kind);
  event.state = state;
  event.bytes = call.bytes();
  event.dtype = tensors.empty() ? "" : c10::toString(tensors[0].scalar_type());
  event.group_size = group.size;
  event.group = group.name;
  return event;
}

}  // namespace

struct Pending::State {
  const Call call;
  const GroupPtr group;
  const std::vector<c10::intrusive_ptr<c10d::Work>> works;
  const uint64_t sequence;
  const bool is_diagnosed;
  const bool has_futures;
  const int64_t divide_by;  // 0: results are complete as they come

  std::mutex mutex;  // guards what follows
  bool is_finished = false;
  std::exception_ptr error;

  detail::GroupState& group_state() const { return detail::state_of(group); }
  std::string operation() const { return str(call.describe(), " #", sequence); }

  void wait_for(c10d::Work& work);
  /// Makes the result final, once. The waiter and the future's callback may come at the same time.
  void finish(std::exception_ptr problem);
};

void Pending::State::finish(std::exception_ptr problem) {
  const std::lock_guard lock(mutex);
  if (is_finished) return;
  if (!problem && divide_by > 1) divide_by_ranks(call.results(), divide_by);
  error = std::move(problem);
  is_finished = true;
  if (is_observed()) announce(event_of(call, group_state().description, error ? "failed" : "done"));
}

void Pending::State::wait_for(c10d::Work& work) {
  if (!is_diagnosed) {
    work.wait();
    return;
  }
  auto& state = group_state();
  try {
    // Through the future, since a wait with a time limit throws each time it is over. Gloo's reduce-scatter has none
    // and runs inside wait(); such a rank learns of a lost peer from its own connections, or when its time is over.
    const auto completion = std::make_shared<Completion>();
    if (has_futures) work.getFuture()->addCallback([completion](c10::ivalue::Future&) { completion->notify(); });
    while (has_futures && !completion->wait_for(kPollInterval)) {
      // The one who gave up may be late itself: this rank's own transport has the last word if it just finished.
      if (detail::has_failure(state) && !work.isCompleted()) {
        detail::report_failure(state, operation(), "another rank gave up");
      }
    }
    work.wait();
  } catch (const c10::DistBackendError& error) {
    // Thrown by report_failure() just now, or because the group was destroyed.
    if (std::string(error.what_without_backtrace()).starts_with("[lockstep/comm]")) throw;
    detail::report_failure(state, operation(), detail::first_line(error));
  } catch (const std::exception& error) {
    detail::report_failure(state, operation(), detail::first_line(error));
  }
}

void Pending::wait() {
  if (!state_) return;
  State& state = *state_;
  std::exception_ptr problem;
  try {
    // Without the lock: gloo runs the future's callback, which takes it, before it lets the waiter go.
    for (const auto& work : state.works) state.wait_for(*work);
  } catch (...) {
    problem = std::current_exception();
  }
  state.finish(problem);
  if (state.error) std::rethrow_exception(state.error);
}

bool Pending::is_completed() const {
  return !state_ ||
         std::all_of(state_->works.begin(), state_->works.end(), [](const auto& work) { return work->isCompleted(); });
}

c10::intrusive_ptr<c10::ivalue::Future> Pending::future() {
  const auto completed = [](const std::vector<at::Tensor>& tensors) {
    auto done = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors());
    done->markCompleted(c10::IValue(tensors));
    return done;
  };
  if (!state_) return completed({});
  if (state_->works.empty()) return completed(state_->call.results());
  if (state_->works.size() == 1 && state_->divide_by <= 1) return state_->works[0]->getFuture();
  std::vector<FuturePtr> parts;
  for (const auto& work : state_->works) parts.push_back(work->getFuture());
  return detail::all_of(parts)->then(
      [state = state_, parts](c10::ivalue::Future&) {
        for (const auto& part : parts) part->waitAndThrow();  // the current stream waits too
        state->finish(nullptr);
        return c10::IValue(state->call.results());
      },
      c10::ListType::ofTensors());
}

struct InterposerScope::PerRank {
  std::mutex mutex;
  std::vector<std::shared_ptr<const Interposer>> interposers;
};

InterposerScope::InterposerScope(Interposer interposer)
    : rank_(rank_local<PerRank>()), interposer_(std::make_shared<const Interposer>(std::move(interposer))) {
  const std::lock_guard lock(rank_.mutex);
  rank_.interposers.push_back(interposer_);
}

InterposerScope::~InterposerScope() {
  const std::lock_guard lock(rank_.mutex);
  std::erase(rank_.interposers, interposer_);
}

Pending run_on_backend(const Call& call, const GroupPtr& group) {
  auto& state = detail::state_of(group);
  detail::check_usable(state);
  const auto sequence = state.next_sequence++;
  if (state.is_alone && call.outputs.empty()) {
    // In place with nobody else: the result is there already, up to its factor.
    if (is_reduction(call.kind) && call.op == ReduceOp::PREMUL_SUM) {
      const at::NoGradGuard no_grad;
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      for (const auto& tensor : call.inputs) tensor.mul_(call.factor);
    }
    return Pending(std::make_shared<Pending::State>(call, group, std::vector<c10::intrusive_ptr<c10d::Work>>{},
                                                    sequence, false, false, int64_t{0}));
  }
  c10d::Backend& backend = backend_for(call, group, state);
  Call effective = call;
  if (effective.timeout == c10d::kUnsetTimeout) effective.timeout = state.description.timeout;
  std::vector<Call> parts = {effective};
  int64_t divide_by = 0;
  if (is_gloo(backend)) {
    if (is_reduction(call.kind) && call.op == ReduceOp::AVG) {
      effective.op = ReduceOp::SUM;
      const bool has_result = call.kind != CallKind::kReduce || state.description.rank == call.root;
      if (has_result) divide_by = state.description.size;
    }
    parts = split_by_tensor(effective);
  }
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  try {
    for (const auto& part : parts) {
      // NCCL has none for a call nobody will wait for: it is on the current stream already.
      if (auto work = dispatch(backend, part)) works.push_back(std::move(work));
    }
  } catch (const c10::DistBackendError&) {
    throw;
  } catch (const std::exception& error) {
    TORCH_CHECK(false, "[lockstep/comm] ", state.who(), ": ", call.describe(), " on group '", state.description.name,
                "': ", detail::first_line(error));
  }
  // Backends keep the tensors alive through the works; the call kept here serves messages and the division.
  const bool has_futures =
      !is_gloo(backend) || (call.kind != CallKind::kReduceScatter && call.kind != CallKind::kReduceScatterSingle);
  return Pending(std::make_shared<Pending::State>(call, group, std::move(works), sequence, needs_diagnosis(backend),
                                                  has_futures, divide_by));
}

Pending launch(const Call& call, const GroupPtr& group) {
  if (is_observed()) announce(event_of(call, detail::state_of(group).description, "launch"));
  std::vector<std::shared_ptr<const Interposer>> interposers;
  {
    auto& rank = rank_local<InterposerScope::PerRank>();
    const std::lock_guard lock(rank.mutex);
    interposers = rank.interposers;
  }
  if (interposers.empty()) return run_on_backend(call, group);
  // Innermost first: each gets a `next` that runs the remaining ones.
  std::function<Pending(const Call&, std::size_t)> run = [&](const Call& current, std::size_t left) -> Pending {
    if (left == 0) return run_on_backend(current, group);
    return (*interposers[left - 1])(current, group,
                                    [&run, left](const Call& changed) { return run(changed, left - 1); });
  };
  return run(call, interposers.size());
}

}  // namespace lockstep
