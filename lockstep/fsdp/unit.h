// A unit of sharded parameters: its modules, its groups of parameters, its settings, and what it does to operators.
// When it is gathered, freed and reduced is for its tree to say (unit_tree.h). Internal to fsdp.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/fsdp/options.h"
#include "lockstep/fsdp/parameter_group.h"
#include "lockstep/intercept/storage_owner.h"

namespace torch::nn {
class Module;
}

namespace lockstep::detail {

class Unit;
class UnitTree;
using UnitPtr = std::shared_ptr<Unit>;

/// A name that a part of a flat parameter had; tied ones have several.
struct FlatName {
  std::string name;  // dotted, as the unit's module knows it
  std::weak_ptr<torch::nn::Module> module;
  std::string key;         // there
  std::size_t handle = 0;  // in the flat parameter
};

/// What a program may set after fully_shard(). Guarded by the tree's mutex.
struct UnitSettings {
  std::optional<bool> reshard_after_forward;
  bool reshard_after_backward = true;
  bool unshard_in_backward = true;
  bool requires_gradient_sync = true;
  bool requires_all_reduce = true;
  bool reduce_scatter_unused_params = false;
  double gradient_divide_factor = 0;  // 0: the number of ranks
  std::function<void(const at::Tensor&)> all_reduce_hook = {};
  std::optional<c10::Stream> all_reduce_hook_stream = std::nullopt;
  /// Gathered when this one is touched, instead of what the order says.
  std::optional<std::vector<std::weak_ptr<Unit>>> forward_prefetch = std::nullopt;
  std::optional<std::vector<std::weak_ptr<Unit>>> backward_prefetch = std::nullopt;
};

class Unit final : public StorageOwner, public std::enable_shared_from_this<Unit> {
 public:
  Unit(const std::vector<std::shared_ptr<torch::nn::Module>>& modules, FullyShardOptions options, DeviceMesh mesh);

  /// Cuts the parameters. Once, before the unit is in a tree. Parameters of one mesh and dtype are gathered together.
  void shard(const std::vector<std::pair<DeviceMesh, WholeParameter>>& parameters);
  /// The name the root has for it.
  void set_name(const std::string& name);

  void before_operator(OperatorCall& call, c10::ArrayRef<TouchedTensor> touched) override;
  void on_result(OperatorCall& call) override;
  void after_operator(const OperatorCall& call) noexcept override;

  /// The module's dotted name below the root; of a root its type.
  const std::string& name() const { return name_; }
  /// The first one; null if it is gone.
  std::shared_ptr<torch::nn::Module> module() const { return modules_.front().lock(); }
  std::size_t module_count() const { return modules_.size(); }
  const FullyShardOptions& options() const { return options_; }
  const DeviceMesh& mesh() const { return mesh_; }
  UnitTree& tree() const { return *tree_; }
  /// In forward order. Empty for a unit without parameters.
  const std::vector<std::unique_ptr<ParameterGroup>>& groups() const { return groups_; }
  bool has_several_meshes() const;
  /// Those along which tensor parallelism has cut its parameters, each once.
  std::vector<GroupPtr> groups_before() const;
  /// In registration order; none if parameters are not flat.
  const std::vector<FlatName>& flat_names() const { return flat_names_; }
  void set_flat_names(std::vector<FlatName> names) { flat_names_ = std::move(names); }
  bool is_root() const { return parent_.expired(); }
  bool is_inside(const Unit& other) const;
  /// "[lockstep/fsdp] rank 1: unit 'encoder'"
  std::string who() const;
  /// For events.
  Event describe() const;

 private:
  friend class UnitTree;

  /// Whether it computes as its module's mode wants it to: in its parameters' own precision.
  bool wants_full_precision() const;
  void cast_inputs(OperatorCall& call) const;

  const std::vector<std::weak_ptr<torch::nn::Module>> modules_;
  std::string name_;
  const FullyShardOptions options_;
  const DeviceMesh mesh_;
  std::vector<std::unique_ptr<ParameterGroup>> groups_;
  std::vector<FlatName> flat_names_;

  // What follows belongs to the tree, and is guarded by its mutex.
  std::shared_ptr<UnitTree> tree_;
  std::weak_ptr<Unit> parent_;
  std::shared_ptr<Unit> kept_parent_;  // the parent, if it has no parameters that keep it alive
  int number_ = 0;                     // in the tree
  enum class Memory { kSharded, kGathering, kWhole } memory_ = Memory::kSharded;
  int users_ = 0;            // operators that run
  bool is_used_ = false;     // by a forward whose backward may come
  bool is_trained_ = false;  // was used so once
  bool is_summoned_ = false;
  std::atomic<bool> is_full_precision_ = false;  // as it was gathered last; operators look without the mutex
  std::size_t arrived_ = 0;                      // gradients of this backward that are to be reduced
  bool is_done_ = false;                         // all its gradients have been made in this backward
  UnitSettings settings_;
};

/// Calls visit(handle, number) for all that a unit's modules compute with.
template <class Visit>
void for_each_handle(const Unit& unit, const Visit& visit) {
  std::size_t number = 0;
  for (const auto& group : unit.groups()) {
    for (const auto& member : group->members()) {
      for (const auto& handle : member.handles) visit(handle, number++);
    }
  }
}

}  // namespace lockstep::detail
