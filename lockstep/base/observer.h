// The one seam through which tests and traces watch the library: it announces what it does as Events, observers listen.
// Steps that features take are announced too, and can be delayed, replaced or failed by tests (StepScope). All is per
// rank. With nothing installed anywhere an announcement costs one relaxed load.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace lockstep {

struct Event {
  std::string kind = "";  // "all_reduce", "all_gather", …; features above comm add theirs ("unshard", "reshard", …)
  std::string unit = "";  // parameter group, module or bucket concerned; empty if none
  std::string state = "";                           // "launch", "done", "failed", or a feature's own word
  std::size_t bytes = 0;                            // what this rank contributes
  std::string dtype = "";                           // as torch prints it; empty if none
  int group_size = 0;                               // 0 if no group is concerned
  std::string group = "";                           // name of the group; empty if none
  std::uint64_t order = 0;                          // position among this rank's events; set by announce()
  std::chrono::steady_clock::time_point when = {};  // set by announce()
};

class Observer {
 public:
  virtual ~Observer() = default;
  /// Called on the thread that acts, in order. Must not communicate.
  virtual void on_event(const Event& event) = 0;
};

namespace detail {
struct RankObservers;
/// Of all ranks of the process.
extern std::atomic<int> observer_count;
}  // namespace detail

/// Installs `observer` for the current rank while it lives; scopes nest, all installed observers are called.
class ObserverScope {
 public:
  explicit ObserverScope(Observer& observer);
  ~ObserverScope();
  ObserverScope(const ObserverScope&) = delete;
  ObserverScope& operator=(const ObserverScope&) = delete;

 private:
  detail::RankObservers& rank_;
  Observer* observer_;
};

/// Runs in the place of a step: calls `next`, which takes it, or does something else, or throws.
using StepInterposer = std::function<void(const Event& step, const std::function<void()>& next)>;

/// Installs an interposer for the current rank's steps while it lives. Scopes nest; the innermost sees a step first.
/// For tests, which break things on purpose; the library itself never does.
class StepScope {
 public:
  explicit StepScope(StepInterposer interposer);
  ~StepScope();
  StepScope(const StepScope&) = delete;
  StepScope& operator=(const StepScope&) = delete;

 private:
  detail::RankObservers& rank_;
  const std::shared_ptr<const StepInterposer> interposer_;
};

/// True if any rank of this process has an observer or a StepScope; ask before building an Event.
inline bool is_observed() {
  return detail::observer_count.load(std::memory_order_relaxed) != 0;
}

/// Numbers the event and hands it to the current rank's observers.
void announce(Event event);

/// Announces a step and takes it, through the current rank's StepScopes if there are any.
void run_step(Event event, const std::function<void()>& step);

}  // namespace lockstep
