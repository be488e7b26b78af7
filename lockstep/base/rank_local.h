// State that belongs to one rank. A rank is a process as a rule; under threads-as-ranks it is a thread, and every layer
// that keeps a "current" something (default group, mesh scope, observers) must keep one per rank. Each type T has one
// instance per rank.
//
// Thread-safe. The instance of a process that is one rank lives until the process ends.
#pragma once

#include <memory>
#include <mutex>
#include <typeindex>
#include <unordered_map>

namespace lockstep {

/// The rank that code runs as. Only the test kit makes one; everything else uses rank_local().
class RankScope {
 public:
  template <class T>
  T& get() {
    const std::lock_guard lock(mutex_);
    auto& slot = slots_[std::type_index(typeid(T))];
    if (!slot) slot = std::make_shared<T>();
    return *static_cast<T*>(slot.get());
  }

  /// This thread's rank, or the process if the thread entered none.
  static RankScope& current();

 private:
  std::mutex mutex_;
  std::unordered_map<std::type_index, std::shared_ptr<void>> slots_;
};

/// Makes the calling thread run as `scope` while it lives. `scope` must outlive it.
class EnterRank {
 public:
  explicit EnterRank(RankScope& scope);
  ~EnterRank();
  EnterRank(const EnterRank&) = delete;
  EnterRank& operator=(const EnterRank&) = delete;

 private:
  RankScope* previous_;
};

/// The current rank's instance of T, default-constructed at first use.
template <class T>
T& rank_local() {
  return RankScope::current().get<T>();
}

}  // namespace lockstep
