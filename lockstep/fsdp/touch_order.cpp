#include "lockstep/fsdp/touch_order.h"

#include <algorithm>
#include <utility>

namespace lockstep::detail {
namespace {

constexpr std::size_t kMostRuns = 1 << 16;

}  // namespace

void TouchOrder::touch(Unit unit) {
  if (!seen_.empty() && seen_.back().unit == unit) {
    ++seen_.back().operators;
    const auto expected = is_following_ ? expected_[position_].operators : 0;
    if (expected == 0 || seen_.back().operators <= expected) return;
    // One more than expected: another pass, which may begin with the unit that was the last one.
    const bool is_new_pass = position_ + 1 == expected_.size() && expected_.front().unit == unit;
    if (!is_new_pass) {
      is_following_ = false;
      return;
    }
    position_ = 0;
    seen_.assign(1, Run{unit, 1});
    return;
  }
  follow(unit);
  // Passes that nobody ends, because no backward follows, must not fill the memory.
  if (seen_.size() >= kMostRuns) seen_.clear();
  seen_.push_back({unit, 1});
}

void TouchOrder::follow(Unit unit) {
  const auto next = seen_.empty() ? 0 : position_ + 1;
  if ((is_following_ || seen_.empty()) && next < expected_.size() && expected_[next].unit == unit) {
    position_ = next;
    is_following_ = true;
    return;
  }
  // Passes without a backward follow each other without a word: the first unit of the order may begin another one.
  is_following_ = !expected_.empty() && expected_.front().unit == unit;
  position_ = 0;
  if (is_following_) seen_.clear();
}

bool TouchOrder::is_run_over() const {
  return is_following_ && expected_[position_].operators == seen_.back().operators;
}

TouchOrder::Unit TouchOrder::next() const {
  if (!is_following_ || position_ + 1 >= expected_.size()) return kNone;
  return expected_[position_ + 1].unit;
}

std::vector<TouchOrder::Unit> TouchOrder::upcoming() const {
  std::vector<Unit> units;
  for (auto i = position_ + 1; is_following_ && i < expected_.size(); ++i) units.push_back(expected_[i].unit);
  return units;
}

bool TouchOrder::end_pass() {
  const auto is_same_unit = [](const Run& one, const Run& other) { return one.unit == other.unit; };
  const bool is_changed = !seen_.empty() && !expected_.empty() &&
                          !std::equal(seen_.begin(), seen_.end(), expected_.begin(), expected_.end(), is_same_unit);
  if (!seen_.empty()) expected_ = std::move(seen_);
  seen_.clear();
  position_ = 0;
  is_following_ = false;
  return is_changed;
}

void TouchOrder::expect(const std::vector<Unit>& order) {
  if (!expected_.empty()) return;
  for (const auto unit : order) expected_.push_back({unit, 0});
}

std::vector<TouchOrder::Unit> TouchOrder::order() const {
  std::vector<Unit> units;
  for (const auto& run : seen_) units.push_back(run.unit);
  return units;
}

}  // namespace lockstep::detail
