// Which operators and profiler ranges run, by name.
#pragma once

#include <ATen/record_function.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace lockstep::testing {

/// Notes what runs while it lives: on the thread that made it, or on all, of which there can be one.
class OperatorCounts {
 public:
  enum class Threads { kThis, kAll };
  explicit OperatorCounts(Threads threads = Threads::kThis) {
    at::RecordFunctionCallback callback(&on_call);
    if (threads == Threads::kAll) {
      of_all_ = this;
      handle_ = at::addGlobalCallback(callback);
    } else {
      of_thread_ = this;
      handle_ = at::addThreadLocalCallback(callback);
    }
  }
  ~OperatorCounts() {
    at::removeCallback(handle_);
    if (of_thread_ == this) of_thread_ = nullptr;
    if (of_all_ == this) of_all_ = nullptr;
  }
  OperatorCounts(const OperatorCounts&) = delete;
  OperatorCounts& operator=(const OperatorCounts&) = delete;

  int of(const std::string& name) const {
    const std::lock_guard lock(mutex_);
    return static_cast<int>(std::count(names_.begin(), names_.end(), name));
  }

 private:
  static std::unique_ptr<at::ObserverContext> on_call(const at::RecordFunction& call) {
    auto* const counts = of_thread_ != nullptr ? of_thread_ : of_all_;
    if (counts != nullptr) {
      const std::lock_guard lock(counts->mutex_);
      counts->names_.emplace_back(call.name());
    }
    return nullptr;
  }

  static inline thread_local OperatorCounts* of_thread_ = nullptr;
  static inline OperatorCounts* of_all_ = nullptr;
  mutable std::mutex mutex_;
  std::vector<std::string> names_;
  at::CallbackHandle handle_ = 0;
};

}  // namespace lockstep::testing
