// How a ZeroOptimizer works on its shard: what this rank has of the state, and where its steps happen. Two forms, of
// which an optimizer has one: ShardedStep steps between backwards, ZeroOverlap inside of them. Internal to zero.
#pragma once

#include <torch/optim/optimizer.h>

#include <functional>
#include <vector>

#include "lockstep/state/piece.h"
#include "lockstep/zero/division.h"

namespace lockstep::detail {

class ZeroOverlap;

/// What stands in for the local optimizer's step().
using LocalStep =
    std::function<at::Tensor(torch::optim::Optimizer& local, const torch::optim::Optimizer::LossClosure& closure)>;

class Sharding {
 public:
  virtual ~Sharding() = default;

  /// The optimizer is being destroyed.
  virtual void detach() noexcept {}

  /// The optimizer has more groups, or the last ones no more.
  virtual void on_group_change() = 0;
  /// Some parameters were frozen or are trainable now.
  virtual void on_trainability_change() = 0;

  /// Steps this rank's shard with the options of the optimizer's groups. Returns the closure's loss, or the local
  /// step's. Local.
  virtual at::Tensor step(const LocalStep& local_step, torch::optim::Optimizer::LossClosure closure) = 0;
  /// As of Division.
  virtual std::vector<Arrival> launch_sync() = 0;

  /// The buffers that parameters are views of.
  virtual std::vector<const FlatShard*> flat_buffers() const = 0;

  /// The gradients of this rank's shard, as views.
  virtual std::vector<at::Tensor> own_gradients() const = 0;
  /// Forgets gradients, also those that .grad only stands for.
  virtual void drop_gradients() = 0;

  /// Throws, saying that `what` needs it, if there is no state yet that could be read or replaced.
  virtual void check_has_state(const char* what) const = 0;
  /// Gives the local optimizer the options of the optimizer's groups.
  virtual void take_options() = 0;
  /// Parameters may have got other values since the last step; what is kept beside them takes those. Local.
  virtual void follow_parameters() {}
  /// This rank's state. Tensors are views of it.
  virtual std::vector<StatePiece> pieces() const = 0;
  /// Takes the state of this rank's shard. Changes nothing if it throws.
  virtual void load(const StateSource& source) = 0;

  virtual ShardingBytes bytes() const = 0;

  /// The memory of parameters that this rank steps.
  virtual std::vector<at::Tensor> own_parameters() const { return {}; }

  /// The optimizer of this rank's shard; null where steps happen inside of backwards.
  virtual torch::optim::Optimizer* local() { return nullptr; }
  /// This, if it is the form whose steps happen inside of backwards; else null.
  virtual ZeroOverlap* as_overlap() { return nullptr; }
};

}  // namespace lockstep::detail
