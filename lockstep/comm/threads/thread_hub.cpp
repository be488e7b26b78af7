#include "lockstep/comm/threads/thread_hub.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <limits>
#include <unordered_map>

#include "lockstep/base/deadline.h"
#include "lockstep/base/str.h"
#include "lockstep/comm/failure.h"

namespace lockstep {
namespace {

/// A misuse error with a message of ours; TORCH_CHECK would throw it here, but it belongs to every rank of the meeting.
std::exception_ptr misuse(const std::string& message) {
  return std::make_exception_ptr(c10::Error({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, message));
}

/// Hubs that not all of their ranks have attached to yet.
struct PendingHubs {
  std::mutex mutex;
  std::unordered_map<std::string, std::pair<std::shared_ptr<ThreadHub>, int>> hubs;
};

PendingHubs& pending_hubs() {
  static PendingHubs& instance = *new PendingHubs;
  return instance;
}

std::optional<at::Device> accelerator_of(const Call& call) {
  for (const auto* tensors : {&call.inputs, &call.outputs}) {
    for (const auto& tensor : *tensors) {
      if (!tensor.device().is_cpu()) return tensor.device();
    }
  }
  return std::nullopt;
}

c10::Stream current_stream(at::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

std::shared_ptr<c10::Event> record(const std::optional<at::Device>& device) {
  if (!device) return nullptr;
  auto event = std::make_shared<c10::Event>(device->type());
  event->record(current_stream(*device));
  return event;
}

void poison(const at::Tensor& tensor) {
  const auto dtype = tensor.scalar_type();
  if (at::isFloatingType(dtype) || at::isComplexType(dtype)) {
    tensor.fill_(std::numeric_limits<double>::quiet_NaN());
  } else if (dtype == at::kBool) {
    tensor.logical_not_();
  } else {
    tensor.fill_(c10::Scalar(int64_t{0x5A}));
  }
}

/// Replaces a call's tensors by buffers and fills what the rank will read with garbage until wait() delivers.
void make_late(Seat& seat, int rank) {
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  Call& call = seat.call;
  const bool reads_inputs_back = call.kind == CallKind::kAllReduce ||
                                 (call.kind == CallKind::kReduce && rank == call.root) ||
                                 (call.kind == CallKind::kBroadcast && rank != call.root);
  for (auto& input : call.inputs) {
    const at::Tensor real = input;
    input = real.detach().clone();
    if (reads_inputs_back) {
      poison(real);
      seat.undelivered.emplace_back(input, real);
    }
  }
  if (call.ends_together) return;  // others may read what is there until all have come, and the new values after that
  for (auto& output : call.outputs) {
    const at::Tensor real = output;
    output = at::empty_like(real, at::MemoryFormat::Contiguous);
    poison(real);
    seat.undelivered.emplace_back(output, real);
  }
}

void deliver(Seat& seat) {
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (auto& [buffer, real] : seat.undelivered) real.copy_(buffer);
  seat.undelivered.clear();
}

void complete_future(Seat& seat, const std::exception_ptr& error) {
  if (error) {
    seat.future->setErrorIfNeeded(error);
  } else {
    deliver(seat);
    seat.future->markCompleted(c10::IValue(seat.results));
  }
}

}  // namespace

ThreadHub::ThreadHub(int size, std::string group_name, std::shared_ptr<ThreadRun> run)
    : size_(size), group_name_(std::move(group_name)), run_(std::move(run)) {}

std::shared_ptr<ThreadHub> ThreadHub::attach(const std::string& key, int size, const std::string& group_name) {
  const auto run = ThreadRun::current();
  auto& pending = pending_hubs();
  std::shared_ptr<ThreadHub> hub;
  bool is_new = false;
  {
    const std::lock_guard lock(pending.mutex);
    // Groups whose ranks failed before all had come leave their hub here with nobody else holding it.
    std::erase_if(pending.hubs, [](const auto& item) { return item.second.first.use_count() == 1; });
    auto& [slot, attached] = pending.hubs[key];
    is_new = slot == nullptr;
    if (is_new) slot = std::make_shared<ThreadHub>(size, group_name, run);
    hub = slot;
    if (++attached == size) pending.hubs.erase(key);
  }
  if (is_new) {
    std::string reason;
    {
      const std::lock_guard lock(run->mutex_);
      std::erase_if(run->hubs_, [](const auto& weak) { return weak.expired(); });
      run->hubs_.push_back(hub);
      reason = run->abort_reason_;
    }
    if (!reason.empty()) hub->abort(reason);
  }
  return hub;
}

std::string ThreadHub::where(int rank, uint64_t sequence) const {
  return str("[lockstep/comm] rank ", rank, " of ", size_, ": collective #", sequence, " on group '", group_name_, "'");
}

std::vector<int> ThreadHub::missing_ranks(const Meeting& meeting) const {
  std::vector<int> missing;
  for (int rank = 0; rank < size_; ++rank) {
    if (!meeting.seats[rank]) missing.push_back(rank);
  }
  return missing;
}

void ThreadHub::finish(Meeting& meeting, std::exception_ptr error) {
  std::vector<Seat*> with_future;
  {
    const std::lock_guard lock(mutex_);
    if (meeting.is_done) return;
    meeting.is_done = true;
    meeting.error = std::move(error);
    for (auto& seat : meeting.seats) {
      if (seat && seat->future) with_future.push_back(&*seat);
    }
  }
  changed_.notify_all();
  for (Seat* seat : with_future) complete_future(*seat, meeting.error);
}

std::shared_ptr<Meeting> ThreadHub::arrive(int rank, uint64_t sequence, Call&& call) {
  run_->schedule().pause(ThreadRun::current_rank());
  auto results = call.results();
  Seat seat{
      .call = std::move(call), .results = std::move(results), .undelivered = {}, .ready = nullptr, .future = nullptr};
  if (run_->schedule().completes_late(ThreadRun::current_rank())) make_late(seat, rank);
  seat.ready = record(accelerator_of(seat.call));

  std::shared_ptr<Meeting> meeting;
  std::exception_ptr error;
  {
    const std::lock_guard lock(mutex_);
    if (!abort_reason_.empty()) throw PeerFailure(str(where(rank, sequence), " cannot start: ", abort_reason_));
    auto& slot = open_meetings_[sequence];
    if (!slot) slot = std::make_shared<Meeting>(size_);
    meeting = slot;
    for (int other = 0; other < size_ && !error; ++other) {
      if (!meeting->seats[other]) continue;
      const Call& theirs = meeting->seats[other]->call;
      if (const auto difference = find_mismatch(theirs, seat.call)) {
        error = misuse(str("[lockstep/comm] collective #", sequence, " on group '", group_name_, "': ranks ", other,
                           " and ", rank, " call with different ", *difference, ". Rank ", other, ": ",
                           theirs.describe(), "; rank ", rank, ": ", seat.call.describe(),
                           ". All ranks must make the same calls in the same order."));
      }
    }
    meeting->seats[rank] = std::move(seat);
    const bool is_last = ++meeting->arrived == static_cast<std::size_t>(size_);
    if (is_last) open_meetings_.erase(sequence);
    if (!is_last && !error) return meeting;
    // A rank that comes after the others gave up learns why from the meeting's error.
    if (meeting->is_done) return meeting;
  }
  if (!error) {
    try {
      const auto device = accelerator_of(meeting->seats[rank]->call);
      std::vector<const Call*> calls;
      for (auto& other : meeting->seats) {
        if (other->ready) other->ready->block(current_stream(*device));
        calls.push_back(&other->call);
      }
      perform(calls);
      meeting->finished = record(device);
    } catch (const std::exception& problem) {
      error = misuse(str("[lockstep/comm] collective #", sequence, " on group '", group_name_, "', ",
                         meeting->seats[rank]->call.describe(), ": ", detail::first_line(problem)));
    }
  }
  finish(*meeting, error);
  return meeting;
}

void ThreadHub::wait(Meeting& meeting, int rank, uint64_t sequence, std::chrono::milliseconds timeout) {
  run_->schedule().pause(ThreadRun::current_rank());
  std::unique_lock lock(mutex_);
  if (!changed_.wait_until(lock, deadline_after(timeout), [&] { return meeting.is_done; })) {
    const auto missing = missing_ranks(meeting);
    const auto what = meeting.seats[rank]->call.describe();
    lock.unlock();
    const auto text = str(where(rank, sequence), ", ", what, ": rank", missing.size() == 1 ? " " : "s ",
                          join(missing, ", "), " did not take part within ", timeout.count(),
                          " ms. Look there for an earlier error, a hang or another order of calls.");
    finish(meeting, std::make_exception_ptr(c10::DistBackendError(text)));
    lock.lock();
  }
  lock.unlock();
  if (meeting.error) std::rethrow_exception(meeting.error);
  Seat& seat = *meeting.seats[rank];
  if (meeting.finished) meeting.finished->block(current_stream(*accelerator_of(seat.call)));
  if (seat.future) {
    seat.future->wait();  // it delivers
  } else {
    deliver(seat);
  }
}

bool ThreadHub::is_done(const Meeting& meeting) const {
  const std::lock_guard lock(mutex_);
  return meeting.is_done;
}

c10::intrusive_ptr<c10::ivalue::Future> ThreadHub::future(Meeting& meeting, int rank) {
  bool is_done = false;
  Seat& seat = *meeting.seats[rank];
  {
    const std::lock_guard lock(mutex_);
    if (seat.future) return seat.future;
    std::vector<c10::Device> devices;
    if (const auto device = accelerator_of(seat.call)) devices.push_back(*device);
    seat.future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors(), devices);
    is_done = meeting.is_done;
  }
  if (is_done) complete_future(seat, meeting.error);
  return seat.future;
}

void ThreadHub::abort(const std::string& reason) {
  std::map<uint64_t, std::shared_ptr<Meeting>> given_up;
  {
    const std::lock_guard lock(mutex_);
    if (abort_reason_.empty()) abort_reason_ = reason;
    given_up.swap(open_meetings_);
  }
  for (const auto& [sequence, meeting] : given_up) {
    finish(*meeting, std::make_exception_ptr(PeerFailure(str("[lockstep/comm] collective #", sequence, " on group '",
                                                             group_name_, "' was given up: ", reason))));
  }
}

std::string ThreadHub::describe_pending() const {
  const std::lock_guard lock(mutex_);
  std::string text;
  for (const auto& [sequence, meeting] : open_meetings_) {
    for (const auto& seat : meeting->seats) {
      if (!seat) continue;
      text += str("  group '", group_name_, "', collective #", sequence, ", ", seat->call.describe(),
                  ": waiting for rank ", join(missing_ranks(*meeting), ", "), "\n");
      break;
    }
  }
  return text;
}

}  // namespace lockstep
