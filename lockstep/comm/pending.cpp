#include "lockstep/comm/pending.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <utility>
#include <vector>

#include "lockstep/base/observer.h"
#include "lockstep/base/rank_local.h"
#include "lockstep/base/str.h"
#include "lockstep/comm/dispatch.h"
#include "lockstep/comm/failure.h"
#include "lockstep/comm/futures.h"
#include "lockstep/comm/interposer.h"
#include "lockstep/comm/plain_memory.h"
#include "lockstep/comm/stream_launch.h"

namespace lockstep {
namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

/// Whatever went wrong after the launch is a peer's or the transport's doing; programs tell that by the type.
FuturePtr with_peer_errors(const FuturePtr& future, std::string operation) {
  return future->then(
      [operation = std::move(operation)](c10::ivalue::Future& done) {
        try {
          return done.value();
        } catch (const c10::DistBackendError&) {
          throw;
        } catch (const std::exception& error) {
          C10_THROW_ERROR(DistBackendError, str(operation, ": ", detail::first_line(error)));
        }
      },
      future->elementType());
}

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

Event event_of(const Call& call, const detail::GroupDescription& group, const char* state) {
  const auto& tensors = call.subjects();
  Event event;
  event.kind = name_of(call.kind);
  event.unit = call.label.str();
  event.state = state;
  event.bytes = call.bytes();
  event.dtype = tensors.empty() ? "" : c10::toString(tensors[0].scalar_type());
  event.group_size = group.size;
  event.group = group.name;
  return event;
}

}  // namespace

struct Pending::State {
  State(GroupPtr group, detail::GroupState& group_state) : group(std::move(group)), group_state(group_state) {}
  ~State();
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  // Fixed once the call is launched.
  const GroupPtr group;
  detail::GroupState& group_state;  // of `group`
  /// For messages, events, the division, and the tensors of a StreamLaunch. Not kept where a work of ours has all that
  /// can be asked for, which keeps the tensors too.
  std::optional<Call> call;
  c10::SmallVector<WorkPtr, 1> works;
  std::optional<detail::StreamLaunch> on_stream;
  uint64_t sequence = 0;
  bool is_diagnosed = false;
  bool has_futures = true;
  int64_t divide_by = 0;                                  // 0: results are complete as they come
  std::vector<std::pair<at::Tensor, at::Tensor>> staged;  // what the backend fills, and where it belongs

  std::mutex mutex;  // guards what follows
  bool is_finished = false;
  bool is_memory_safe = false;  // the stream the tensors come from has waited
  std::exception_ptr error;

  /// What is left to be done with the backend's results.
  void complete_results();
  void wait_for_all();
  void wait_for(c10d::Work& work);
  /// Makes the result final, once. The waiter and the future's callback may come at the same time.
  void finish(std::exception_ptr problem);
};

Pending::State::~State() {
  if (!on_stream || is_memory_safe) return;
  try {
    for (const auto* tensors : {&call->inputs, &call->outputs}) on_stream->protect(*tensors);
    // NOLINTNEXTLINE(bugprone-empty-catch): the device is lost, and its memory with it
  } catch (...) {
  }
}

void Pending::State::complete_results() {
  if (!staged.empty()) {
    const at::NoGradGuard no_grad;
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    for (const auto& [from, to] : std::exchange(staged, {})) to.copy_(from.view_as(to));
  }
  if (const auto ranks = std::exchange(divide_by, 0); ranks > 1) divide_by_ranks(call->results(), ranks);
}

void Pending::State::finish(std::exception_ptr problem) {
  const std::lock_guard lock(mutex);
  if (is_finished) return;
  if (!problem) complete_results();
  error = std::move(problem);
  is_finished = true;
  if (call && is_observed()) announce(event_of(*call, group_state.description, error ? "failed" : "done"));
}

void Pending::State::wait_for(c10d::Work& work) {
  if (!is_diagnosed) {
    work.wait();
    return;
  }
  auto& state = group_state;
  const auto operation = [&] { return call->describe(sequence); };
  try {
    // Through the future, since a wait with a time limit throws each time it is over. Gloo's reduce-scatter has none
    // and runs inside wait(); such a rank learns of a lost peer from its own connections, or when its time is over.
    if (has_futures) detail::wait_unless_others_give_up(*work.getFuture(), state, operation);
    work.wait();
  } catch (const c10::DistBackendError& error) {
    // Thrown by report_failure() just now, or because the group was destroyed.
    if (std::string(error.what_without_backtrace()).starts_with("[lockstep/comm]")) throw;
    detail::report_failure(state, operation(), detail::first_line(error));
  } catch (const std::exception& error) {
    detail::report_failure(state, operation(), detail::first_line(error));
  }
}

void Pending::State::wait_for_all() {
  // Without the lock: gloo runs the future's callback, which takes it, before it lets the waiter go.
  for (const auto& work : works) wait_for(*work);
  if (on_stream && on_stream->wait()) {
    const std::lock_guard lock(mutex);
    is_memory_safe = true;
  }
}

void Pending::wait() {
  if (!state_) return;
  State& state = *state_;
  std::exception_ptr problem;
  try {
    state.wait_for_all();
  } catch (...) {
    problem = std::current_exception();
  }
  state.finish(problem);
  if (state.error) std::rethrow_exception(state.error);
}

bool Pending::is_completed() const {
  if (!state_) return true;
  if (state_->on_stream) return state_->on_stream->is_completed();
  return std::all_of(state_->works.begin(), state_->works.end(), [](const auto& work) { return work->isCompleted(); });
}

c10::intrusive_ptr<c10::ivalue::Future> Pending::future() {
  const auto completed = [](const std::vector<at::Tensor>& tensors) {
    auto done = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors());
    done->markCompleted(c10::IValue(tensors));
    return done;
  };
  if (!state_) return completed({});
  if (state_->on_stream) return state_->on_stream->future(state_->call->results());
  if (state_->works.empty()) return completed(state_->call->results());
  const auto future_of = [&](c10d::Work& work) {
    auto future = work.getFuture();
    return state_->is_diagnosed ? with_peer_errors(future, state_->call->describe(state_->sequence)) : future;
  };
  if (state_->works.size() == 1 && state_->divide_by <= 1 && state_->staged.empty())
    return future_of(*state_->works[0]);
  std::vector<FuturePtr> parts;
  for (const auto& work : state_->works) parts.push_back(future_of(*work));
  return detail::all_of(parts)->then(
      [state = state_, parts](c10::ivalue::Future&) {
        for (const auto& part : parts) part->waitAndThrow();  // the current stream waits too
        state->finish(nullptr);
        return c10::IValue(state->call->results());
      },
      c10::ListType::ofTensors());
}

namespace {

// Of all ranks of the process: with none a launch looks no further.
std::atomic<int> interposer_count = 0;

}  // namespace

struct InterposerScope::PerRank {
  std::mutex mutex;
  std::vector<std::shared_ptr<const Interposer>> interposers;
};

InterposerScope::InterposerScope(Interposer interposer)
    : rank_(rank_local<PerRank>()), interposer_(std::make_shared<const Interposer>(std::move(interposer))) {
  const std::lock_guard lock(rank_.mutex);
  rank_.interposers.push_back(interposer_);
  interposer_count.fetch_add(1, std::memory_order_relaxed);
}

InterposerScope::~InterposerScope() {
  const std::lock_guard lock(rank_.mutex);
  std::erase(rank_.interposers, interposer_);
  interposer_count.fetch_sub(1, std::memory_order_relaxed);
}

namespace {

void check_well_formed(const Call& call, const detail::GroupState& state) {
  const auto problem = find_problem(call, state.description.rank, state.description.size);
  TORCH_CHECK(!problem, "[lockstep/comm] ", state.who(), ": ", name_of(call.kind), ": ", *problem);
}

/// With nobody else a result is what was given, up to its factor.
void run_alone(const Call& call) {
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (std::size_t i = 0; i < call.outputs.size(); ++i) {
    call.outputs[i].copy_(call.inputs[i].reshape(call.outputs[i].sizes()));
  }
  if (!is_reduction(call.kind) || call.op != ReduceOp::PREMUL_SUM) return;
  for (const auto& tensor : call.results()) tensor.mul_(call.factor);
}

/// libtorch's backends send and fill memory as it lies; gloo does not even ask whether it is in one piece. Exchanges
/// tensors that are not for copies, and returns those that must be copied back.
std::vector<std::pair<at::Tensor, at::Tensor>> stage(Call& call, int rank) {
  std::vector<std::pair<at::Tensor, at::Tensor>> staged;
  const bool gets_inputs = call.kind == CallKind::kAllReduce || (call.kind == CallKind::kReduce && rank == call.root) ||
                           (call.kind == CallKind::kBroadcast && rank != call.root);
  const at::NoGradGuard no_grad;
  for (auto& input : call.inputs) {
    if (detail::is_plain_memory(input)) continue;
    const auto copy = detail::plain_copy(input);
    if (gets_inputs) staged.emplace_back(copy, input);
    input = copy;
  }
  for (auto& output : call.outputs) {
    if (detail::is_plain_memory(output)) continue;
    const auto room = at::empty(output.sizes(), output.options());
    staged.emplace_back(room, output);
    output = room;
  }
  return staged;
}

WorkPtr start(const detail::ServingBackend& serving, Call&& call) {
  if (serving.ours != nullptr) return serving.ours->start(std::move(call));
  return detail::dispatch_through_c10d(*serving.backend, std::move(call), serving.traits);
}

}  // namespace

Pending run_on_backend(Call call, const GroupPtr& group) {
  auto& state = detail::state_of(group);
  detail::check_usable(state);
  auto pending = std::make_shared<Pending::State>(group, state);
  pending->sequence = state.next_sequence++;
  if (state.is_alone) {
    run_alone(call);
    pending->call = std::move(call);
    return Pending(std::move(pending));
  }
  const bool is_barrier = call.kind == CallKind::kBarrier;
  const auto device = is_barrier ? c10::Device(c10::kCPU) : call.subjects().at(0).device();
  const auto serving =
      is_barrier ? detail::barrier_backend(group, state) : detail::backend_for(group, state, device.type(), call);
  const auto& traits = serving.traits;
  if (call.timeout == c10d::kUnsetTimeout) call.timeout = state.description.timeout;
  pending->is_diagnosed = !traits.names_missing_ranks;
  pending->has_futures = traits.has_reduce_scatter_futures ||
                         (call.kind != CallKind::kReduceScatter && call.kind != CallKind::kReduceScatterSingle);
  const bool has_stream = traits.runs_on_current_stream && call.is_async && !is_barrier;
  const bool is_plain = serving.ours != nullptr && traits.averages && traits.coalesces && traits.names_missing_ranks &&
                        !traits.runs_on_current_stream;
  if (!is_plain || is_observed()) pending->call = call;
  if (serving.ours == nullptr) pending->staged = stage(call, state.description.rank);
  if (!traits.averages && is_reduction(call.kind) && call.op == ReduceOp::AVG) {
    call.op = ReduceOp::SUM;
    const bool has_result = call.kind != CallKind::kReduce || state.description.rank == call.root;
    if (has_result) pending->divide_by = state.description.size;
  }
  const auto start_one = [&](Call&& part) {
    auto work = start(serving, std::move(part));
    // NCCL has none for a call that is on the current stream.
    if (!work) return;
    if (has_stream) {
      work->wait();  // enqueues, no more
    } else {
      pending->works.push_back(std::move(work));
    }
  };
  const auto start_all = [&] {
    if (traits.coalesces || call.inputs.size() <= 1) return start_one(std::move(call));
    for (auto& part : split_by_tensor(call)) start_one(std::move(part));
  };
  const auto start_on_stream = [&] {
    call.is_async = false;
    start_all();
    // There too, so that whoever waits or takes the future finds the result complete.
    pending->complete_results();
  };
  try {
    if (has_stream) {
      pending->on_stream.emplace(state, device, start_on_stream);
    } else {
      start_all();
    }
  } catch (const c10::DistBackendError&) {
    throw;
  } catch (const std::exception& error) {
    TORCH_CHECK(false, "[lockstep/comm] ", state.who(), ": ", (pending->call ? *pending->call : call).describe(),
                " on group '", state.description.name, "': ", detail::first_line(error));
  }
  return Pending(std::move(pending));
}

Pending launch(Call call, const GroupPtr& group) {
  const auto& state = detail::state_of(group);
  if (call.label.empty()) call.label = LabelScope::current();
  check_well_formed(call, state);
  if (is_observed()) announce(event_of(call, state.description, "launch"));
  if (interposer_count.load(std::memory_order_relaxed) == 0) return run_on_backend(std::move(call), group);
  std::vector<std::shared_ptr<const Interposer>> interposers;
  {
    auto& rank = rank_local<InterposerScope::PerRank>();
    const std::lock_guard lock(rank.mutex);
    interposers = rank.interposers;
  }
  // Innermost first: each gets a `next` that runs the remaining ones.
  std::function<Pending(const Call&, std::size_t)> run = [&](const Call& current, std::size_t left) -> Pending {
    if (left == 0) {
      check_well_formed(current, state);
      return run_on_backend(current, group);
    }
    return (*interposers[left - 1])(current, group,
                                    [&run, left](const Call& changed) { return run(changed, left - 1); });
  };
  return run(call, interposers.size());
}

}  // namespace lockstep
