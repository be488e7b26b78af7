// In which order a pass touches units, learnt from the pass before: what comes next can be gathered early, and a unit
// can be freed right behind its last operator instead of when another one is touched. Internal to fsdp. Pure.
//
// A *run* is a row of operators that touch one unit. A guess that is wrong costs gathers, never results, and all ranks
// guess alike as long as they run the same program.
#pragma once

#include <cstddef>
#include <vector>

namespace lockstep::detail {

class TouchOrder {
 public:
  using Unit = int;
  static constexpr Unit kNone = -1;

  /// Notes that an operator touches `unit`.
  void touch(Unit unit);
  /// The operator of the last touch is over. True if it was, as in the pass before, the last one of its run.
  bool is_run_over() const;
  /// The unit that was touched after this run the last time; kNone if that is not known.
  Unit next() const;
  /// The unit a pass began with the last time; kNone if that is not known.
  Unit first() const { return expected_.empty() ? kNone : expected_.front().unit; }
  /// All units behind this run as it was the last time, in that order; none if that is not known.
  std::vector<Unit> upcoming() const;
  /// The pass is over: the next one begins anew, and expects this order. True if it was another one than expected.
  bool end_pass();
  /// Expects `order`, unless a pass has been seen.
  void expect(const std::vector<Unit>& order);
  /// The units of this pass so far, run by run.
  std::vector<Unit> order() const;

 private:
  struct Run {
    Unit unit;
    std::size_t operators;  // 0: not known
  };

  void follow(Unit unit);

  std::vector<Run> expected_;
  std::vector<Run> seen_;
  std::size_t position_ = 0;  // in expected_, of the run that goes on
  bool is_following_ = false;
};

}  // namespace lockstep::detail
