#include "lockstep/comm/threads/thread_backend.h"

#include "lockstep/base/rank_local.h"
#include "lockstep/comm/threads/thread_hub.h"

namespace lockstep {
namespace {

class ThreadWork : public c10d::Work {
 public:
  ThreadWork(std::shared_ptr<ThreadHub> hub, std::shared_ptr<Meeting> meeting, int rank, uint64_t sequence,
             std::chrono::milliseconds timeout)
      : Work(rank), hub_(std::move(hub)), meeting_(std::move(meeting)), sequence_(sequence), timeout_(timeout) {}

  bool isCompleted() override { return hub_->is_done(*meeting_); }
  bool isSuccess() const override { return hub_->is_done(*meeting_) && !meeting_->error; }
  std::exception_ptr exception() const override { return hub_->is_done(*meeting_) ? meeting_->error : nullptr; }
  uint64_t getSequencenumber() const override { return sequence_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return hub_->future(*meeting_, rank_); }

  bool wait(std::chrono::milliseconds timeout) override {
    hub_->wait(*meeting_, rank_, sequence_, timeout == kNoTimeout ? timeout_ : timeout);
    return true;
  }

  std::vector<at::Tensor> result() override { return meeting_->seats[rank_]->results; }

 private:
  const std::shared_ptr<ThreadHub> hub_;
  const std::shared_ptr<Meeting> meeting_;
  const uint64_t sequence_;
  const std::chrono::milliseconds timeout_;
};

struct RunSlot {
  std::mutex mutex;
  std::shared_ptr<ThreadRun> run;
  int rank = 0;
};

}  // namespace

ThreadRun::ThreadRun(std::shared_ptr<ThreadSchedule> schedule) : schedule_(std::move(schedule)) {}

std::vector<std::shared_ptr<ThreadHub>> ThreadRun::hubs() {
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<ThreadHub>> alive;
  for (const auto& weak : hubs_) {
    if (auto hub = weak.lock()) alive.push_back(std::move(hub));
  }
  return alive;
}

void ThreadRun::abort(const std::string& reason) {
  {
    const std::lock_guard lock(mutex_);
    if (abort_reason_.empty()) abort_reason_ = reason;
  }
  for (const auto& hub : hubs()) hub->abort(reason);
}

std::string ThreadRun::describe_pending() {
  std::string text;
  for (const auto& hub : hubs()) text += hub->describe_pending();
  return text;
}

void ThreadRun::throw_if_aborted(const std::string& context) {
  const std::lock_guard lock(mutex_);
  if (!abort_reason_.empty()) throw PeerFailure(context + abort_reason_);
}

std::shared_ptr<ThreadRun> ThreadRun::current() {
  auto& slot = rank_local<RunSlot>();
  const std::lock_guard lock(slot.mutex);
  if (!slot.run) slot.run = std::make_shared<ThreadRun>();
  return slot.run;
}

int ThreadRun::current_rank() {
  auto& slot = rank_local<RunSlot>();
  const std::lock_guard lock(slot.mutex);
  return slot.rank;
}

void ThreadRun::enter(std::shared_ptr<ThreadRun> run, int rank) {
  auto& slot = rank_local<RunSlot>();
  const std::lock_guard lock(slot.mutex);
  slot.run = std::move(run);
  slot.rank = rank;
}

ThreadBackend::ThreadBackend(const std::string& hub_key, int rank, int size, const std::string& group_name,
                             std::chrono::milliseconds timeout)
    : CallBackend(rank, size, "threads", timeout), hub_(ThreadHub::attach(hub_key, size, group_name)) {}

ThreadBackend::~ThreadBackend() = default;

void ThreadBackend::abort() {
  fail("the group was aborted");
}

void ThreadBackend::fail(const std::string& reason) {
  hub_->abort(reason);
}

CallBackend::WorkPtr ThreadBackend::submit(Call&& call) {
  const uint64_t sequence = next_sequence_++;
  const auto timeout = call.timeout;
  auto meeting = hub_->arrive(rank_, sequence, std::move(call));
  return c10::make_intrusive<ThreadWork>(hub_, std::move(meeting), rank_, sequence, timeout);
}

}  // namespace lockstep
