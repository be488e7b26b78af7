// A unit of sharded parameters, and the tree of units under one root that run together. Internal to fsdp.
//
// Operators are the only events: the first that touches a parameter of a unit makes it whole, and a unit is freed when
// it is not needed any more. Gradients arrive by hooks of the whole parameters. Threads: the program's and autograd's
// run one after the other, but nothing here relies on it: the tree has a lock.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/fsdp/options.h"
#include "lockstep/fsdp/parameter_group.h"
#include "lockstep/fsdp/touch_order.h"
#include "lockstep/intercept/storage_owner.h"

namespace torch::nn {
class Module;
}

namespace lockstep::detail {

class UnitTree;

class Unit final : public StorageOwner, public std::enable_shared_from_this<Unit> {
 public:
  Unit(const std::shared_ptr<torch::nn::Module>& module, FullyShardOptions options, DeviceMesh mesh);

  /// Cuts the parameters. Once, before the unit is in a tree.
  void shard(const std::vector<WholeParameter>& parameters);

  void before_operator(const OperatorCall& call, c10::ArrayRef<TouchedTensor> touched) override;
  void after_operator(const OperatorCall& call) noexcept override;

  const std::string& name() const { return name_; }
  /// Null if it is gone.
  std::shared_ptr<torch::nn::Module> module() const { return module_.lock(); }
  const FullyShardOptions& options() const { return options_; }
  const DeviceMesh& mesh() const { return mesh_; }
  UnitTree& tree() const { return *tree_; }
  /// One per dtype: a gather moves values of one.
  const std::vector<std::unique_ptr<ParameterGroup>>& groups() const { return groups_; }
  bool is_root() const { return parent_.expired(); }
  bool is_inside(const Unit& other) const;
  /// "[lockstep/fsdp] rank 1 of 4: unit 'encoder'"
  std::string who() const;

 private:
  friend class UnitTree;

  const std::weak_ptr<torch::nn::Module> module_;
  std::string name_;  // of the module's type; below a root the module's dotted name
  const FullyShardOptions options_;
  const DeviceMesh mesh_;
  std::vector<std::unique_ptr<ParameterGroup>> groups_;

  // What follows belongs to the tree, and is guarded by its mutex.
  std::shared_ptr<UnitTree> tree_;
  std::weak_ptr<Unit> parent_;
  std::shared_ptr<Unit> kept_parent_;  // the parent, if it has no parameters that keep it alive
  int number_ = 0;                     // in the tree
  enum class Memory { kSharded, kGathering, kWhole } memory_ = Memory::kSharded;
  int users_ = 0;         // operators that run
  bool is_used_ = false;  // by a forward whose backward may come
  bool is_summoned_ = false;
  std::size_t arrived_ = 0;  // gradients of this backward that are to be reduced
  bool is_done_ = false;     // all its gradients have been made in this backward
  // Settings.
  std::optional<bool> reshard_after_forward_ = options_.reshard_after_forward;
  bool reshard_after_backward_ = true;
  bool requires_gradient_sync_ = true;
};

using UnitPtr = std::shared_ptr<Unit>;

class UnitTree : public std::enable_shared_from_this<UnitTree> {
 public:
  /// Makes `unit` the root of a tree with the units of `below`, which are roots themselves until now.
  static void make(const UnitPtr& unit, const std::vector<UnitPtr>& below);

  void begin_operator(Unit& unit, const OperatorCall& call, c10::ArrayRef<TouchedTensor> touched);
  void end_operator(Unit& unit) noexcept;
  void on_gradient(Unit& unit);

  // For the program.
  void unshard(Unit& unit, bool is_async);
  void reshard(Unit& unit);
  void set_requires_gradient_sync(Unit& unit, bool is_on, bool recurse);
  void set_reshard_after_forward(Unit& unit, bool is_on, bool recurse);
  void set_reshard_after_backward(Unit& unit, bool is_on, bool recurse);
  void set_gradient_divide_factor(double factor);
  /// Waits, frees and forgets what a step that threw has left behind.
  void reset();
  /// While summoned, whole parameters may be written; afterwards the local part of that is kept if `writeback`.
  void summon(Unit& unit);
  void end_summon(Unit& unit, bool writeback);
  bool is_idle() const;
  /// No operator has touched it yet.
  bool is_unused() const { return !is_started_; }

  /// Those that are alive, inner ones first.
  std::vector<UnitPtr> units() const;
  /// `unit` and, with `recurse`, those inside of it.
  std::vector<UnitPtr> below(const Unit& unit, bool recurse) const;

 private:
  enum class Pass { kNone, kForward, kBackward };

  TouchOrder& order() { return pass_ == Pass::kBackward ? backward_order_ : forward_order_; }
  void check_access(const Unit& unit, const OperatorCall& call, c10::ArrayRef<TouchedTensor> touched) const;
  /// Tells forward from backward, and ends what a throw has left.
  void enter_pass();
  void enter_backward();
  void end_backward();
  void make_whole(Unit& unit);
  void check_unchanged(Unit& unit);
  void launch_gather(Unit& unit);
  void free(Unit& unit);
  bool may_free(const Unit& unit) const;
  void free_others(const Unit& unit);
  void prefetch();
  void reduce(Unit& unit);
  void finish_reductions(std::size_t left);
  void forget_step();
  /// Ends a unit's part of a step.
  void rest(Unit& unit, bool is_freed);
  void end_passes();
  UnitPtr unit_at(int number) const;

  mutable std::recursive_mutex mutex_;
  std::vector<std::weak_ptr<Unit>> units_;  // by number; the root is the last
  bool is_started_ = false;
  Pass pass_ = Pass::kNone;
  std::weak_ptr<int> backward_;  // expires when autograd's pass is over, or has thrown
  int current_ = TouchOrder::kNone;
  TouchOrder forward_order_;
  TouchOrder backward_order_;
  std::vector<UnitPtr> reducing_;  // in launch order
  double divide_factor_ = 0;       // 0: the number of ranks
};

}  // namespace lockstep::detail
