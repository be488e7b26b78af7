// The one seam through which tests and traces watch the library: it announces what it does as Events, observers listen.
// Observers are per rank. With none installed anywhere an announcement costs one relaxed load.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
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

/// Installs `observer` for the current rank while it lives; scopes nest, all installed observers are called.
class ObserverScope {
 public:
  explicit ObserverScope(Observer& observer);
  ~ObserverScope();
  ObserverScope(const ObserverScope&) = delete;
  ObserverScope& operator=(const ObserverScope&) = delete;

 private:
  struct PerRank;
  PerRank& rank_;
  Observer* observer_;

  friend void announce(Event event);
};

namespace detail {
extern std::atomic<int> observer_count;
}

/// True if any rank of this process has an observer; ask before building an Event.
inline bool is_observed() {
  return detail::observer_count.load(std::memory_order_relaxed) != 0;
}

/// Numbers the event and hands it to the current rank's observers.
void announce(Event event);

}  // namespace lockstep
