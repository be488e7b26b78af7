// The state of an optimizer whose parameters are shards, by the names these have in their module: whole tensors, or
// this rank's parts. Any torch::optim::Optimizer that can be saved: libtorch's and lockstep::optim's.
//
// Values that are no tensors of the parameter's sizes, such as counts of steps, are taken as they are. A parameter that
// has not been stepped has no state, and none is made up: an optimizer without any loads as one that is new.
#pragma once

#include "lockstep/fsdp/state_dict.h"

namespace torch::optim {
class Optimizer;
}

namespace lockstep {

/// Copies, gathered. Collective: all ranks of the units' meshes call it, with optimizers that have stepped the same
/// parameters, which is checked.
NamedOptimizerState full_optimizer_state_dict(const torch::nn::Module& module, const torch::optim::Optimizer& optimizer,
                                              const FullStateOptions& options = {});

/// This rank's parts. Local; tensors are the optimizer's own, not copies.
NamedOptimizerState sharded_optimizer_state_dict(const torch::nn::Module& module,
                                                 const torch::optim::Optimizer& optimizer,
                                                 const ShardedStateOptions& options = {});

/// Replaces options and state by whole tensors, of which each rank takes its part. `strict`: every parameter that
/// requires a gradient has state, if any has, and all names are the module's. Throws, naming what is missing or does
/// not fit; then nothing has changed.
void load_full_optimizer_state_dict(const torch::nn::Module& module, torch::optim::Optimizer& optimizer,
                                    const NamedOptimizerState& state, const LoadFullStateOptions& options = {});

/// Replaces them by what any number of ranks has saved: `parts` are those of all of them. Local.
void load_sharded_optimizer_state_dict(const torch::nn::Module& module, torch::optim::Optimizer& optimizer,
                                       const std::vector<NamedOptimizerState>& parts,
                                       const LoadShardedStateOptions& options = {});

namespace detail {
struct FlatPiece;

/// The last one, one part after the other. Refers to the optimizer.
class OptimizerStateLoader {
 public:
  OptimizerStateLoader(const torch::nn::Module& module, torch::optim::Optimizer& optimizer,
                       const LoadShardedStateOptions& options);
  ~OptimizerStateLoader();
  OptimizerStateLoader(const OptimizerStateLoader&) = delete;
  OptimizerStateLoader& operator=(const OptimizerStateLoader&) = delete;

  void add(const NamedOptimizerState& part);
  /// Throws, having changed nothing, if something is missing or does not fit.
  void finish();

 private:
  struct Wanted;
  void add(Wanted& wanted, const NamedValues& values, const Sharding* sharding);
  void add(Wanted& wanted, const NamedValues& values, const FlatPiece& piece);
  void check_complete() const;

  torch::optim::Optimizer& optimizer_;
  const LoadShardedStateOptions options_;
  std::vector<Wanted> wanted_;  // in the optimizer's order
  std::set<std::string> module_names_;
  std::set<std::string> unknown_;
  bool has_state_ = false;
  std::vector<NamedOptimizerState::Group> groups_;
};

}  // namespace detail
}  // namespace lockstep
