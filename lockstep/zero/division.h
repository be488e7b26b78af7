// How parameters are divided among ranks: what of them this rank's local optimizer steps, how gradients come to it, how
// the ranks' results meet, and what of the state lies where. Internal to zero; ShardedStep uses it.
//
// Used by one thread. Nothing here communicates except launch_sync().
#pragma once

#include <torch/optim/optimizer.h>

#include <vector>

#include "lockstep/shard/flat_shard.h"
#include "lockstep/state/optimizer_state.h"
#include "lockstep/state/piece.h"
#include "lockstep/zero/arriving_parameters.h"

namespace lockstep::detail {

/// Bytes that are kept between steps beside parameters.
struct ShardingBytes {
  int64_t state = 0;        // this rank's; not filled in by divisions
  int64_t buckets = 0;      // that hold parameters
  int64_t gradients = 0;    // this rank's, of the second stage
  int64_t temporaries = 0;  // that are used in a step
};

class Division {
 public:
  virtual ~Division() = default;

  /// Divides these groups. Groups can be added at the end and taken away there; those that stay keep their ranks and
  /// their state. Changes nothing if it throws.
  virtual void set_groups(std::vector<std::vector<at::Tensor>> groups) = 0;

  /// What this rank's optimizer steps, group by group; groups may be empty.
  virtual std::vector<std::vector<at::Tensor>> local_parameters() const = 0;

  /// Some parameters were frozen or are trainable now. Local optimizers must be given local_parameters() afterwards.
  virtual void on_trainability_change() = 0;

  /// False if gradients have to be taken before the local optimizer's step, so that a closure runs before it too.
  virtual bool takes_gradients_in_place() const { return true; }
  /// Sharded gradients only: this step's gradients are all whole ones, of which none came from an averaged backward.
  virtual bool has_only_whole_gradients() const { return false; }
  /// Whether the local parameters must be cut differently before gradients can be taken: see load().
  virtual bool must_recut() const { return false; }
  /// Brings the parameters' gradients to the local parameters.
  virtual void take_gradients() {}
  /// Forgets them, so that nobody keeps the memory of gradients that are dropped.
  virtual void drop_gradients() {}
  /// The gradients of this rank's shard, as views.
  virtual std::vector<at::Tensor> own_gradients() const = 0;

  /// The buffers that parameters are views of; none if they keep their own memory.
  virtual std::vector<const FlatShard*> flat_buffers() const { return {}; }

  /// Gives all ranks every rank's shard of the parameters, those first that forwards need first. Collective; does not
  /// wait.
  virtual std::vector<Arrival> launch_sync() = 0;

  /// This rank's state, given that of local_parameters(). Tensors are views of it.
  virtual std::vector<StatePiece> pieces(const OptimizerStateDict& local) const = 0;
  /// The state the source has for this rank's shard, as local optimizers take it, in the dtypes the source has it in
  /// and without options. May cut local_parameters() anew.
  virtual OptimizerStateDict load(const StateSource& source) = 0;

  virtual ShardingBytes bytes() const = 0;
};

}  // namespace lockstep::detail
