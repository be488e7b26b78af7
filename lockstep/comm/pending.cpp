#include "lockstep/comm/pending.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>

#include <vector>

#include "lockstep/base/observer.h"
#include "lockstep/base/rank_local.h"
#include "lockstep/base/str.h"
#include "lockstep/comm/failure.h"
#include "lockstep/comm/interposer.h"
#include "lockstep/comm/thread_backend.h"

namespace lockstep {
namespace {

// How long a rank waits before it asks whether others have given up, and between asking again.
constexpr auto kPollInterval = std::chrono::milliseconds(200);

/// Gloo's errors do not say which rank is missing; our own backends' do, and NCCL's wait only enqueues.
bool needs_diagnosis(const c10d::Backend& backend) {
  return backend.getBackendName() == "gloo";
}

bool is_average(const Call& call) {
  switch (call.kind) {
    case CallKind::kAllReduce:
    case CallKind::kReduce:
    case CallKind::kReduceScatter:
    case CallKind::kReduceScatterSingle:
      return call.op == ReduceOp::AVG;
    default:
      return false;
  }
}

void divide(const std::vector<at::Tensor>& tensors, int64_t by) {
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (const auto& tensor : tensors) {
    if (c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/true)) {
      tensor.div_(by, "trunc");
    } else {
      tensor.div_(by);
    }
  }
}

const std::vector<at::Tensor>& results_of(const Call& call) {
  return call.outputs.empty() ? call.inputs : call.outputs;
}

at::DeviceType device_of(const Call& call, const c10d::ProcessGroup& group) {
  for (const auto* tensors : {&call.inputs, &call.outputs}) {
    if (!tensors->empty()) return tensors->front().device().type();
  }
  return group.getDeviceTypes().front().type();
}

c10d::Backend& backend_for(const Call& call, const GroupPtr& group, const detail::GroupState& state) {
  if (call.kind == CallKind::kBarrier) return *group->getDefaultBackend();
  const auto device = device_of(call, *group);
  TORCH_CHECK(serves_device(group, device), "[lockstep/comm] ", state.who(), ": ", call.describe(),
              " on group '", state.description.name, "': the group has no backend for ", c10::DeviceTypeName(device, true),
              " tensors");
  return *group->getBackend(device);
}

Event event_of(const Call& call, const detail::GroupDescription& group, const char* state) {
  const auto& tensors = call.inputs.empty() ? call.outputs : call.inputs;
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
  const c10::intrusive_ptr<c10d::Work> work;
  const uint64_t sequence;
  const bool is_diagnosed;
  const int64_t divide_by;  // 0: results are complete as they come

  std::mutex mutex;  // guards what follows
  bool is_finished = false;
  std::exception_ptr error;

  detail::GroupState& group_state() const { return detail::state_of(group); }
  std::string operation() const { return str(call.describe(), " #", sequence); }

  void wait_for_work();
};

void Pending::State::wait_for_work() {
  if (!is_diagnosed) {
    work->wait();
    return;
  }
  auto& state = group_state();
  try {
    while (true) {
      try {
        work->wait(kPollInterval);
        return;
      } catch (const std::exception&) {
        if (work->isCompleted()) break;
      }
      bool others_gave_up = false;
      try {
        others_gave_up = detail::has_failure(state);
      } catch (const std::exception& store_error) {
        detail::report_failure(state, operation(), detail::first_line(store_error));
      }
      // The one who gave up may be right: give this rank's own transport the last word if it just finished.
      if (others_gave_up && !work->isCompleted()) {
        detail::report_failure(state, operation(), "another rank gave up");
      }
    }
    work->wait();
  } catch (const c10::DistBackendError& error) {
    if (std::string(error.what_without_backtrace()).starts_with("[lockstep")) throw;
    detail::report_failure(state, operation(), detail::first_line(error));
  } catch (const std::exception& error) {
    detail::report_failure(state, operation(), detail::first_line(error));
  }
}

void Pending::wait() {
  if (!state_) return;
  State& state = *state_;
  const std::lock_guard lock(state.mutex);
  if (!state.is_finished) {
    try {
      state.wait_for_work();
      if (state.divide_by > 1) divide(results_of(state.call), state.divide_by);
    } catch (...) {
      state.error = std::current_exception();
    }
    state.is_finished = true;
    if (is_observed()) {
      announce(event_of(state.call, state.group_state().description, state.error ? "failed" : "done"));
    }
  }
  if (state.error) std::rethrow_exception(state.error);
}

bool Pending::is_completed() const {
  return !state_ || state_->work->isCompleted();
}

c10::intrusive_ptr<c10::ivalue::Future> Pending::future() {
  if (!state_) {
    auto done = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors());
    done->markCompleted(c10::IValue(std::vector<at::Tensor>{}));
    return done;
  }
  auto future = state_->work->getFuture();
  if (state_->divide_by <= 1) return future;
  return future->then(
      [state = state_](c10::ivalue::Future& done) {
        done.value();  // rethrows
        const std::lock_guard lock(state->mutex);
        if (!state->is_finished) {
          divide(results_of(state->call), state->divide_by);
          state->is_finished = true;
        }
        return c10::IValue(results_of(state->call));
      },
      c10::ListType::ofTensors());
}

struct InterposerScope::PerRank {
  std::mutex mutex;
  std::vector<Interposer> interposers;
};

InterposerScope::InterposerScope(Interposer interposer) : rank_(rank_local<PerRank>()) {
  const std::lock_guard lock(rank_.mutex);
  rank_.interposers.push_back(std::move(interposer));
}

InterposerScope::~InterposerScope() {
  const std::lock_guard lock(rank_.mutex);
  rank_.interposers.pop_back();
}

Pending run_on_backend(const Call& call, const GroupPtr& group) {
  auto& state = detail::state_of(group);
  detail::check_usable(state);
  const auto sequence = state.next_sequence++;
  c10d::Backend& backend = backend_for(call, group, state);
  // Not every release of gloo averages, and none of them integers.
  const bool divides_here = is_average(call) && needs_diagnosis(backend);
  Call effective = call;
  if (divides_here) effective.op = ReduceOp::SUM;
  if (effective.timeout == c10d::kUnsetTimeout) effective.timeout = state.description.timeout;
  c10::intrusive_ptr<c10d::Work> work;
  try {
    work = dispatch(backend, effective);
  } catch (const PeerFailure&) {
    throw;
  } catch (const c10::DistBackendError&) {
    throw;
  } catch (const std::exception& error) {
    TORCH_CHECK(false, "[lockstep/comm] ", state.who(), ": ", call.describe(), " on group '", state.description.name,
                "': ", detail::first_line(error));
  }
  // Backends keep the tensors alive through the work; the call kept here serves messages and the division.
  return Pending(std::make_shared<Pending::State>(call, group, std::move(work), sequence, needs_diagnosis(backend),
                                                  divides_here && (call.kind != CallKind::kReduce ||
                                                                   state.description.rank == call.root)
                                                      ? state.description.size
                                                      : 0));
}

Pending launch(Call call, const GroupPtr& group) {
  if (is_observed()) announce(event_of(call, detail::state_of(group).description, "launch"));
  std::vector<Interposer> interposers;
  {
    auto& rank = rank_local<InterposerScope::PerRank>();
    const std::lock_guard lock(rank.mutex);
    interposers = rank.interposers;
  }
  // Innermost first: each gets a `next` that runs the remaining ones.
  std::function<Pending(const Call&, std::size_t)> run = [&](const Call& current, std::size_t left) -> Pending {
    if (left == 0) return run_on_backend(current, group);
    return interposers[left - 1](current, group, [&run, left](const Call& changed) { return run(changed, left - 1); });
  };
  return run(call, interposers.size());
}

}  // namespace lockstep
