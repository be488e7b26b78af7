#include "lockstep/comm/shm/call_queue.h"

#include <ATen/core/ivalue.h>

#include "lockstep/base/deadline.h"

namespace lockstep::detail {
namespace {

void complete(c10::ivalue::Future& future, const std::vector<at::Tensor>& results, const std::exception_ptr& error) {
  if (error) {
    future.setErrorIfNeeded(error);
  } else {
    future.markCompleted(c10::IValue(results));
  }
}

}  // namespace

bool QueuedWork::isCompleted() {
  return is_done_;
}

bool QueuedWork::isSuccess() const {
  return is_done_ && !error_;
}

std::exception_ptr QueuedWork::exception() const {
  return is_done_ ? error_ : nullptr;
}

bool QueuedWork::wait(std::chrono::milliseconds timeout) {
  if (!is_done_ && !queue_->wait(*this, timeout)) {
    throw c10::DistBackendError("[lockstep/comm] the collective did not finish within " +
                                std::to_string(timeout.count()) + " ms, the limit given to wait()");
  }
  if (error_) std::rethrow_exception(error_);
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> QueuedWork::getFuture() {
  std::unique_lock lock(queue_->mutex_);
  if (!future_) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors());
    const bool is_done = is_done_;
    const auto future = future_;
    lock.unlock();
    if (is_done) complete(*future, result(), error_);
    return future;
  }
  return future_;
}

CallQueue::~CallQueue() = default;

void CallQueue::drive(std::unique_lock<std::mutex>& lock, WorkPtr work, bool is_background) {
  is_driven_ = true;
  lock.unlock();
  std::exception_ptr error;
  try {
    work->perform(is_background);
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  work->error_ = error;
  work->is_done_ = true;
  // The seat is free before callbacks run: they may wait for other calls of this queue.
  is_driven_ = false;
  const auto future = work->future_;
  if (is_background && future && idle_threads_ == 0 && !is_closed_) start_thread();
  changed_.notify_all();
  lock.unlock();
  if (future) complete(*future, work->result(), error);
  // Not under the lock: the last reference to a Python tensor takes the GIL, whose holder may ask isCompleted().
  work.reset();
  lock.lock();
}

void CallQueue::start_thread() {
  threads_.emplace_back([self = shared_from_this()] { self->run_in_background(); });
}

void CallQueue::push(const WorkPtr& work) {
  {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK(!is_closed_, close_reason_);
    waiting_.push_back(work);
    if (threads_.empty()) start_thread();
  }
  changed_.notify_all();
}

void CallQueue::run(const WorkPtr& work) {
  std::unique_lock lock(mutex_);
  TORCH_CHECK(!is_closed_, close_reason_);
  if (waiting_.empty() && !is_driven_) return drive(lock, work, false);
  waiting_.push_back(work);
  lock.unlock();
  wait(*work, kNoTimeout);
}

bool CallQueue::wait(QueuedWork& work, std::chrono::milliseconds timeout) {
  const auto deadline = deadline_after(timeout);
  std::unique_lock lock(mutex_);
  while (!work.is_done_) {
    if (timeout != kNoTimeout) {
      // Driving could not be given up when the time is over.
      if (changed_.wait_until(lock, deadline) == std::cv_status::timeout) return work.is_done_;
    } else if (!is_driven_ && !waiting_.empty()) {
      auto next = std::move(waiting_.front());
      waiting_.pop_front();
      drive(lock, std::move(next), false);
    } else {
      changed_.wait(lock);
    }
  }
  return true;
}

void CallQueue::run_in_background() {
  std::unique_lock lock(mutex_);
  while (true) {
    ++idle_threads_;
    changed_.wait(lock, [&] { return is_closed_ || (!is_driven_ && !waiting_.empty()); });
    --idle_threads_;
    if (is_closed_) return;
    auto next = std::move(waiting_.front());
    waiting_.pop_front();
    drive(lock, std::move(next), true);
  }
}

bool CallQueue::is_idle() const {
  const std::lock_guard lock(mutex_);
  return waiting_.empty() && !is_driven_;
}

void CallQueue::close(const std::string& reason) {
  std::deque<WorkPtr> given_up;
  std::vector<c10::intrusive_ptr<c10::ivalue::Future>> futures;
  const auto error = std::make_exception_ptr(c10::DistBackendError(reason));
  {
    std::unique_lock lock(mutex_);
    is_closed_ = true;
    close_reason_ = reason;
    given_up.swap(waiting_);
    for (const auto& work : given_up) {
      work->error_ = error;
      work->is_done_ = true;
      if (work->future_) futures.push_back(work->future_);
    }
    changed_.notify_all();
    // A callback may drop the last reference to the owner while it runs on one of these very threads.
    for (auto& thread : threads_) {
      if (thread.get_id() == std::this_thread::get_id()) thread.detach();
    }
    changed_.wait(lock, [&] { return !is_driven_; });
  }
  // Before the threads are waited for: one may run a callback that waits for such a future.
  for (const auto& future : futures) complete(*future, {}, error);
  for (auto& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
}

void CallQueue::abandon() {
  for (auto& thread : threads_) thread.detach();
  threads_.clear();
}

}  // namespace lockstep::detail
