// A graph that is the same in every step: the first backward counts how often each gradient comes, and is reduced at
// its end; afterwards a gradient is complete when it has come as often. Internal to ddp.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

namespace lockstep::detail {

class StaticGraph {
 public:
  StaticGraph(std::size_t parameters, bool is_on) : is_on_(is_on), firings_(parameters) {}

  bool is_on() const { return is_on_; }
  void turn_on() { is_on_ = true; }
  bool has_counted() const { return has_counted_; }
  /// On, and the first backward is still to come or under way.
  bool is_counting() const { return is_on_ && !has_counted_; }

  /// In the first backward: the gradient has come.
  void count(std::size_t parameter) { ++firings_[parameter]; }
  void end_counting() { has_counted_ = true; }
  bool has_counted_any() const;
  /// Parameters whose gradient did not come.
  std::vector<std::size_t> unused() const;
  /// Whether the ranks still have to tell each other what they use: they do it once, in the first backward of any.
  bool must_share_marks() {
    if (!std::exchange(has_shared_marks_, true)) shares_marks_now_ = true;
    return shares_marks_now_;
  }
  /// They do it in the backward under way.
  bool shares_marks_now() const { return shares_marks_now_; }

  void begin_backward();
  /// In later backwards. The gradient has come: whether it is one too many, one of several, or complete.
  enum class Arrival { kTooMany, kPartial, kComplete };
  Arrival arrive(std::size_t parameter);

  /// The first backward failed, and will be repeated. Does nothing afterwards.
  void give_up();
  /// Counts anew.
  void reset();

 private:
  bool is_on_;
  bool has_counted_ = false;
  bool has_shared_marks_ = false;
  bool shares_marks_now_ = false;
  std::vector<int> firings_;  // by parameter
  std::vector<int> left_;
};

}  // namespace lockstep::detail
