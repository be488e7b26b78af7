// Records what the current rank does, and checks on the record. One recorder per rank; no recorder, no cost.
#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "lockstep/base/observer.h"

namespace lockstep::testing {

class Recorder : public Observer {
 public:
  Recorder() : scope_(*this) {}

  void on_event(const Event& event) override;
  std::vector<Event> events() const;
  /// Events with this state only: one per collective for "launch".
  std::vector<Event> events(const std::string& state) const;
  void clear();

 private:
  mutable std::mutex mutex_;
  std::vector<Event> events_;
  const ObserverScope scope_;  // last: no event may come before the rest exists
};

/// Names an event in a check: "all_reduce", or "all_reduce(bucket 0)" to ask for the unit as well.
bool is_named(const Event& event, const std::string& name);

/// The checks below throw CheckFailure with both sequences, differences marked.

/// The events are exactly these, in this order.
void expect_exact_order(const std::vector<Event>& events, const std::vector<std::string>& names);
/// These occur in this order; others may stand between.
void expect_subset_order(const std::vector<Event>& events, const std::vector<std::string>& names);
/// `name` occurs this often.
void expect_count(const std::vector<Event>& events, const std::string& name, std::size_t count);
/// `name` does not occur.
void expect_none(const std::vector<Event>& events, const std::string& name);
/// `early` was launched before `late` was: communication that can overlap it.
void expect_launched_before(const std::vector<Event>& events, const std::string& early, const std::string& late);

}  // namespace lockstep::testing
