#include "lockstep/testing/recorder.h"

#include <algorithm>
#include <optional>
#include <sstream>

#include "lockstep/base/str.h"
#include "lockstep/testing/run.h"

namespace lockstep::testing {
namespace {

std::string label(const Event& event) {
  return event.unit.empty() ? event.kind : str(event.kind, "(", event.unit, ")");
}

std::string list(const std::vector<Event>& events) {
  std::ostringstream out;
  for (const auto& event : events) out << "  " << event.order << " " << event.state << " " << label(event) << "\n";
  return events.empty() ? "  (nothing)\n" : out.str();
}

std::optional<std::size_t> position(const std::vector<Event>& events, const std::string& name, std::size_t from = 0) {
  for (std::size_t i = from; i < events.size(); ++i) {
    if (is_named(events[i], name)) return i;
  }
  return std::nullopt;
}

}  // namespace

bool is_named(const Event& event, const std::string& name) {
  return event.kind == name || label(event) == name;
}

void Recorder::on_event(const Event& event) {
  const std::lock_guard lock(mutex_);
  events_.push_back(event);
}

std::vector<Event> Recorder::events() const {
  const std::lock_guard lock(mutex_);
  return events_;
}

std::vector<Event> Recorder::events(const std::string& state) const {
  auto all = events();
  std::erase_if(all, [&](const Event& event) { return event.state != state; });
  return all;
}

void Recorder::clear() {
  const std::lock_guard lock(mutex_);
  events_.clear();
}

void expect_exact_order(const std::vector<Event>& events, const std::vector<std::string>& names) {
  const auto longest = std::max(events.size(), names.size());
  bool is_equal = events.size() == names.size();
  std::ostringstream diff;
  for (std::size_t i = 0; i < longest; ++i) {
    const auto expected = i < names.size() ? names[i] : "(nothing)";
    const auto found = i < events.size() ? label(events[i]) : "(nothing)";
    const bool is_same = i < names.size() && i < events.size() && is_named(events[i], names[i]);
    is_equal = is_equal && is_same;
    if (is_same) {
      diff << "    " << found << "\n";
    } else {
      diff << "  - " << expected << "\n  + " << found << "\n";
    }
  }
  if (!is_equal) throw CheckFailure(str("events differ (- expected, + found):\n", diff.str()));
}

void expect_subset_order(const std::vector<Event>& events, const std::vector<std::string>& names) {
  std::size_t from = 0;
  for (const auto& name : names) {
    const auto found = position(events, name, from);
    if (!found) {
      throw CheckFailure(str("expected in this order: ", join(names, ", "), "; '", name, "' does not come ",
                             from == 0 ? "at all" : "after those before it", ". Events:\n", list(events)));
    }
    from = *found + 1;
  }
}

void expect_count(const std::vector<Event>& events, const std::string& name, std::size_t count) {
  const auto found = static_cast<std::size_t>(
      std::count_if(events.begin(), events.end(), [&](const Event& event) { return is_named(event, name); }));
  if (found != count) {
    throw CheckFailure(str("expected '", name, "' ", count, " times, found ", found, ". Events:\n", list(events)));
  }
}

void expect_none(const std::vector<Event>& events, const std::string& name) {
  expect_count(events, name, 0);
}

void expect_launched_before(const std::vector<Event>& events, const std::string& early, const std::string& late) {
  const auto first = position(events, early);
  const auto second = position(events, late);
  if (!first || !second || *first >= *second) {
    throw CheckFailure(str("expected '", early, "' to be launched before '", late, "'. Events:\n", list(events)));
  }
}

}  // namespace lockstep::testing
