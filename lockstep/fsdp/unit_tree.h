// The units under one root, which run together: when each is gathered, freed and reduced. Internal to fsdp.
//
// Operators are the only events: the first that touches a parameter of a unit makes it whole, and a unit is freed when
// it is not needed any more. Gradients arrive by hooks of the whole parameters. Threads: the program's and autograd's
// run one after the other, but nothing here relies on it: the tree has a lock.
#pragma once

#include <c10/core/Event.h>

#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "lockstep/fsdp/touch_order.h"
#include "lockstep/fsdp/unit.h"
#include "lockstep/fsdp/unit_steps.h"

namespace lockstep::detail {

/// What a Join scope has to do with steps. Called with the tree's lock held.
class StepListener {
 public:
  virtual ~StepListener() = default;
  /// The first operator of a step is about to touch a unit.
  virtual void on_step(bool is_recorded) = 0;
  /// What gradients are divided by; 0: the number of ranks.
  virtual double divisor() const = 0;
};

/// A backward that does not build a graph runs on this thread: what it calls is no forward.
bool is_plain_backward();

class UnitTree : public std::enable_shared_from_this<UnitTree> {
 public:
  /// Makes `unit` the root of a tree with the units of `below`, which are roots themselves until now.
  static void make(const UnitPtr& unit, const std::vector<UnitPtr>& below);

  void begin_operator(Unit& unit, const OperatorCall& call, c10::ArrayRef<TouchedTensor> touched);
  void end_operator(Unit& unit) noexcept;
  void on_gradient(Unit& unit, const at::Tensor& parameter);

  // For the program.
  void unshard(Unit& unit, bool is_async);
  void reshard(Unit& unit);
  /// Calls change(settings) for the unit and, with `recurse`, those inside of it.
  template <class Change>
  void set(const Unit& unit, bool recurse, const Change& change) {
    const std::lock_guard lock(mutex_);
    for (const auto& each : below(unit, recurse)) change(each->settings_);
  }
  /// While there is one, gradients are set aside instead of reduced. They nest.
  void begin_no_sync();
  void end_no_sync();
  /// Reductions of a backward that is not the last one stay on their way.
  void set_is_last_backward(bool is_last);
  void set_reductions_in_flight(std::size_t count);
  /// The next gather waits for it.
  void set_post_optim_event(c10::Event event);
  /// Backward of `loss`, which counts `weight` times in the mean over all ranks and backwards.
  void backward(const at::Tensor& loss, double weight);
  /// Null: none. While there is one, steps are noted so that they can be mirrored.
  void set_step_listener(StepListener* listener);
  /// Since units were gathered last.
  bool has_written_shards() const;
  /// All collectives of a step as it was the last time, with gradients of zero; shards get what was reduced. False if
  /// no step was noted.
  bool mirror_step();
  /// Waits, frees and forgets what a step that threw has left behind.
  void reset();
  /// While summoned, whole parameters have memory of the program's (fsdp/summon.h), and the unit leaves them alone.
  void begin_summon(Unit& unit);
  void end_summon(Unit& unit) noexcept;
  bool is_idle() const;
  /// No operator has touched it yet.
  bool is_unused() const { return !is_started_; }
  /// False if it was taken before: there is one.
  bool take_comm_hook() { return !std::exchange(has_comm_hook_, true); }

  /// Those that are alive, inner ones first.
  std::vector<UnitPtr> units() const;
  /// `unit` and, with `recurse`, those inside of it.
  std::vector<UnitPtr> below(const Unit& unit, bool recurse) const;

 private:
  /// What the program did to units in a step.
  struct StepEvent {
    enum class Kind { kTouch, kEndOperator, kWeights, kGradient, kEndBackward } kind;
    int unit = TouchOrder::kNone;
    bool is_recorded = false;  // a touch, by autograd
    bool is_backward = false;  // a touch, also by a forward that backward runs again
    std::size_t handle = 0;    // whose gradient
  };

  const TouchOrder& order() const { return pass_ == Pass::kBackward ? backward_order_ : forward_order_; }
  TouchOrder& order() { return pass_ == Pass::kBackward ? backward_order_ : forward_order_; }
  void check_access(const Unit& unit, const OperatorCall& call, c10::ArrayRef<TouchedTensor> touched) const;
  /// Tells forward from backward, and ends what a throw has left.
  void enter_pass(bool is_recorded);
  void enter_backward();
  void accept_whole();
  void touch(Unit& unit, bool is_recorded);
  /// Makes the unit whole for an operator, and gathers what comes next.
  void prepare(Unit& unit, bool is_recorded);
  void gradient_arrived(Unit& unit);
  void add_weights(const Unit& root, double weight, at::Device device);
  void note(const StepEvent& event);
  void mirror(const StepEvent& event);
  void check_zeroed() const;
  /// No parameter below the root has got a gradient without being sharded or ignored.
  void check_registered() const;
  bool is_in_backward() const;
  void end_backward();
  void make_whole(Unit& unit);
  void check_unchanged(Unit& unit);
  void launch_gather(Unit& unit);
  /// Evaluation may be in another precision than training.
  void follow_precision(Unit& unit);
  void check_order(const Unit& unit) const;
  void free(Unit& unit);
  bool frees_after_backward(const Unit& unit) const;
  bool may_free(const Unit& unit) const;
  void free_others(const Unit& unit);
  void prefetch(const Unit& unit);
  double divisor_of(const Unit& unit) const;
  void reduce_in_turn(Unit& unit);
  void reduce(Unit& unit);
  void reduce_now(Unit& unit);
  void finish_reductions(std::size_t left);
  void forget_step();
  /// Ends a unit's part of a step.
  void rest(Unit& unit, bool is_freed);
  void end_passes();
  /// Gradients of earlier backwards wait to be reduced.
  bool has_kept();
  bool syncs(const Unit& unit) const { return no_syncs_ == 0 && unit.settings_.requires_gradient_sync; }
  UnitPtr unit_at(int number) const;

  mutable std::recursive_mutex mutex_;
  std::vector<std::weak_ptr<Unit>> units_;  // by number; the root is the last
  bool is_started_ = false;
  bool are_whole_refused_ = false;  // gradients of whole parameters
  int64_t backwards_ = 0;
  bool has_comm_hook_ = false;
  Pass pass_ = Pass::kNone;
  std::exception_ptr late_error_;  // of a unit freed behind its last operator: thrown by the next touch
  std::weak_ptr<int> backward_;    // expires when autograd's pass is over, or has thrown
  int current_ = TouchOrder::kNone;
  std::vector<int> whole_;  // units that are: few of many
  TouchOrder forward_order_;
  TouchOrder backward_order_;
  bool is_order_known_ = false;
  bool has_warned_of_order_ = false;

  std::optional<c10::Event> post_optim_event_;

  StepListener* listener_ = nullptr;
  std::vector<StepEvent> step_;       // noted so far
  std::vector<StepEvent> last_step_;  // whole
  std::shared_ptr<int> mirrored_;     // set while a step is mirrored; expires instead of autograd's pass
  bool is_backward_mirrored_ = false;

  std::vector<int> turns_;         // units that wait for those before them, where ranks may differ in what they use
  std::vector<UnitPtr> reducing_;  // in launch order
  UnitPtr replicating_;            // the last one whose sum over replicas was started
  std::size_t reductions_in_flight_ = 1;  // while the next unit's backward runs
  int no_syncs_ = 0;
  bool is_last_backward_ = true;
  double weight_so_far_ = 0;    // of backwards whose gradients were set aside
  double weight_of_all_ = 0;    // of the backward that runs; 0: it is not weighted
  bool is_weightless_ = false;  // its gradients count as zeros, whatever they are: NaN too
};

}  // namespace lockstep::detail
