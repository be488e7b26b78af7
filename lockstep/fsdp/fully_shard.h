// Fully sharded data parallel: parameters, gradients and optimizer state are divided among the ranks, and a part of the
// model is whole only while it computes. Works on modules as they are, libtorch's own included:
//
//   for (auto& block : *model->blocks) lockstep::fully_shard(*block);   // inner units first
//   lockstep::fully_shard(*model);                                      // what is left
//   torch::optim::AdamW optimizer(model->parameters(), 1e-3);           // after sharding: these are shards
//   ...
//   model->forward(x).mean().backward();
//   optimizer.step();
//
// The first operator that touches a parameter gathers its unit; docs/fsdp.md walks through a step.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/fsdp/options.h"
#include "lockstep/fsdp/summon.h"
#include "lockstep/fsdp/unit_comm.h"

namespace torch::nn {
class Module;
}
namespace torch::optim {
class Optimizer;
}

namespace lockstep {

namespace detail {
class Unit;
}

/// While it lives, backwards keep gradients whole on every rank and add them up; the first one after it reduces the
/// sum. Zeroing the shards' gradients drops it. Scopes nest.
class FsdpNoSync {
 public:
  explicit FsdpNoSync(std::shared_ptr<detail::Unit> root);
  ~FsdpNoSync();
  FsdpNoSync(FsdpNoSync&& other) noexcept : root_(std::move(other.root_)) {}
  FsdpNoSync(const FsdpNoSync&) = delete;
  FsdpNoSync& operator=(const FsdpNoSync&) = delete;

 private:
  std::shared_ptr<detail::Unit> root_;
};

/// outputs[i] = this rank's share of the sum over the group of inputs[i].
using FsdpCommHook = std::function<void(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                                        const GroupPtr& group)>;

/// A handle to a unit. Copies are handles to the same unit, which lives as long as its module's parameters.
class FsdpUnit {
 public:
  explicit FsdpUnit(std::shared_ptr<detail::Unit> unit) : unit_(std::move(unit)) {}

  /// The dotted name by which the root's module knows this one's; empty for a root.
  const std::string& name() const;
  const FullyShardOptions& options() const;
  bool is_root() const;
  /// Names of the parameters it holds, as its module knows them.
  std::vector<std::string> parameter_names() const;

  /// Gathers the unit before it is needed. Collective. With `async` it returns at once, and the first operator waits.
  void unshard(bool async = false);
  /// Frees it. Local.
  void reshard();

  /// Without it backwards set gradients aside, as in no_sync().
  void set_requires_gradient_sync(bool requires_gradient_sync, bool recurse = true);
  /// Without it, on a mesh of two axes, gradients are reduced among the ranks that shard and kept; the first backward
  /// with it adds them up over replicas.
  void set_requires_all_reduce(bool requires_all_reduce, bool recurse = true);
  /// False: the next backwards leave their reductions on their way, and shards with the gradients they have, or zeros,
  /// until the one that is the last. Zeroing gradients drops them. Root only.
  void set_is_last_backward(bool is_last_backward);
  void set_reshard_after_forward(bool reshard_after_forward, bool recurse = true);
  void set_reshard_after_backward(bool reshard_after_backward, bool recurse = true);
  /// False: backward does not gather this unit ahead, because it needs none of its parameters. What it touches after
  /// all is gathered then.
  void set_unshard_in_backward(bool unshard_in_backward);
  /// Units to gather ahead when this one is touched, instead of the next one.
  void set_modules_to_forward_prefetch(const std::vector<FsdpUnit>& units);
  void set_modules_to_backward_prefetch(const std::vector<FsdpUnit>& units);
  /// Gradients of this unit are summed and divided by this instead of by the number of ranks.
  void set_gradient_divide_factor(double factor, bool recurse = false);
  /// Parameters without gradients count as zeros, so that ranks may use different ones of a unit; units are reduced in
  /// the order of the forward then.
  void set_reduce_scatter_unused_params(bool reduce_scatter_unused_params, bool recurse = true);
  /// Called with the reduced gradients of this unit, flat, before shards get them; may change them. With `stream` it
  /// runs there, behind the reduction, and shards wait for it; not on a mesh with replicas, whose sum has its own.
  void set_all_reduce_hook(std::function<void(const at::Tensor& gradients)> hook,
                           std::optional<c10::Stream> stream = std::nullopt);
  /// Recorded behind the optimizer's step on another stream than the current one: the next gather waits for it. For
  /// once: set another one after the next step. Without effect on a mesh of CPUs. Root only.
  void set_post_optim_event(c10::Event event);
  /// How this unit gathers and reduces.
  void set_custom_all_gather(const std::shared_ptr<AllGatherComm>& comm);
  void set_custom_reduce_scatter(const std::shared_ptr<ReduceScatterComm>& comm);
  /// Replaces the reduction of all units: gets the scaled gradients and fills outputs with this rank's share. Once,
  /// before the first forward. Root only.
  void register_comm_hook(FsdpCommHook hook);
  /// Reductions go over a group of their own, so that they and gathers need not wait for each other. Collective over
  /// the world. Root only.
  void set_separate_reduce_scatter_group();
  /// How many units' reductions may be on their way while backward goes on; at least 1. Root only.
  void set_max_reductions_in_flight(int count);

  /// Backward of `loss`, with this rank's gradients counting `weight` times (its samples, or its tokens): the mean over
  /// all samples even if ranks have different numbers of them. Collective unless in no_sync(), where weights add up
  /// like gradients. Root only.
  void backward(const at::Tensor& loss, double weight = 1);
  /// Root only, between steps.
  [[nodiscard]] FsdpNoSync no_sync();

  /// After a forward or backward that threw: drops what that step has left behind. Root only. A step that begins after
  /// a backward that threw does it by itself.
  void reset_iter_state();

  /// Parameters of this unit, whole, for a scope between steps. Collective. Refused in a backward, and inside of
  /// another one.
  [[nodiscard]] SummonGuard summon_full_params(const SummonOptions& options = {});
  /// Calls `function` for the unit's module and all below it, in such a scope: to initialise, say. Collective.
  void apply(const std::function<void(torch::nn::Module& module)>& function);

  /// Scales the gradients of all shards in place so that their norm, over all ranks, is at most `max_norm`; returns the
  /// norm before. Collective. Root only.
  at::Tensor clip_grad_norm_(double max_norm, double norm_type = 2.0);

 private:
  friend class FsdpJoinable;

  void check_one_mesh(const char* what) const;
  static std::vector<std::weak_ptr<detail::Unit>> in_tree_of(const detail::Unit& unit,
                                                             const std::vector<FsdpUnit>& units);

  std::shared_ptr<detail::Unit> unit_;
};

/// Shards the parameters below `module` that no other unit holds and no one ignores. Collective over the mesh the first
/// time it needs a group; units inside of others are made first. `module` must be held by a shared_ptr or a holder.
FsdpUnit fully_shard(torch::nn::Module& module, const FullyShardOptions& options = {});
template <class Holder>
  requires requires(Holder& holder) { *holder; }
FsdpUnit fully_shard(Holder module, const FullyShardOptions& options = {}) {
  return fully_shard(*module, options);
}

/// One unit of several modules, none of which holds another: a norm and a head, say. It cannot be a root.
FsdpUnit fully_shard(const std::vector<std::shared_ptr<torch::nn::Module>>& modules,
                     const FullyShardOptions& options = {});

/// The unit that `module` is; none if it is not one.
std::optional<FsdpUnit> unit_of(const torch::nn::Module& module);

/// Throws if the optimizer holds a parameter as it was before sharding, which no step would reach, and names it; or if
/// it needs whole parameters (LBFGS).
void check_optimizer(const torch::nn::Module& module, const torch::optim::Optimizer& optimizer);

}  // namespace lockstep
