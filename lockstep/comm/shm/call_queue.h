// Runs calls one after the other in the order they were given, and lets the caller compute meanwhile. Internal to comm.
//
// A call runs on the queue's own thread, or on the thread of somebody who waits for it and finds the queue idle: a
// caller that waits at once pays for no switch of threads. Whoever runs a call *drives*; there is one driver at a time.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

namespace lockstep::detail {

class CallQueue;

/// One call in a queue. Derived classes say what it does.
class QueuedWork : public c10d::Work {
 public:
  QueuedWork(std::shared_ptr<CallQueue> queue, int rank, uint64_t sequence)
      : Work(rank), queue_(std::move(queue)), sequence_(sequence) {}

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return sequence_; }

 protected:
  /// Does the work; throws if it fails. `is_background`: nobody waits for it, as far as is known.
  virtual void perform(bool is_background) = 0;

 private:
  friend class CallQueue;
  const std::shared_ptr<CallQueue> queue_;
  const uint64_t sequence_;

  // Written under the queue's mutex; once is_done_ is set, error_ no longer changes.
  std::atomic<bool> is_done_ = false;
  std::exception_ptr error_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class CallQueue : public std::enable_shared_from_this<CallQueue> {
 public:
  using WorkPtr = c10::intrusive_ptr<QueuedWork>;

  CallQueue() = default;
  ~CallQueue();
  CallQueue(const CallQueue&) = delete;
  CallQueue& operator=(const CallQueue&) = delete;

  /// Behind all calls before it; runs in the background.
  void push(const WorkPtr& work);
  /// Runs `work` on this thread once those before it have run. Its error is in the work.
  void run(const WorkPtr& work);
  bool is_idle() const;
  /// Calls that have not begun fail with `reason`; waits for the one that runs. Called once, by the owner.
  void close(const std::string& reason);
  /// Instead of close() in a forked process, where the threads are not and locks may be held by nobody.
  void abandon();

 private:
  friend class QueuedWork;
  bool wait(QueuedWork& work, std::chrono::milliseconds timeout);
  /// Runs one call with the driver's seat taken and the lock released, then takes the lock again.
  void drive(std::unique_lock<std::mutex>& lock, WorkPtr work, bool is_background);
  void run_in_background();
  /// REQUIRES: the lock is held.
  void start_thread();

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<WorkPtr> waiting_;
  bool is_driven_ = false;
  int idle_threads_ = 0;
  bool is_closed_ = false;
  std::string close_reason_;
  // The first is started with the first call that needs it, another whenever one begins a callback and no other is
  // idle: the callback may wait for a later call's future, and somebody has to drive that call.
  std::vector<std::thread> threads_;
};

}  // namespace lockstep::detail
