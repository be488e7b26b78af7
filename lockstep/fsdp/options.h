// How a module is sharded: the options of fully_shard(), under Python's names.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <concepts>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/fsdp/shard_balance.h"
#include "lockstep/mesh/device_mesh.h"

namespace torch::nn {
class Module;
}

namespace lockstep {

/// BatchNorm of any number of dims.
bool is_batch_norm(const torch::nn::Module& module);

/// In which dtypes a unit gathers, computes and reduces. Shards, optimizer and state dicts keep theirs. Only floating
/// point parameters are cast.
struct MixedPrecisionPolicy {
  std::optional<at::ScalarType> param_dtype = std::nullopt;
  /// Of the reduction; unset: param_dtype.
  std::optional<at::ScalarType> reduce_dtype = std::nullopt;
  /// Of what the unit's operators return; unset: as they return it.
  std::optional<at::ScalarType> output_dtype = std::nullopt;
  /// Floating point operands beside a parameter are cast to its dtype.
  bool cast_forward_inputs = true;
  /// Of floating point buffers, from fully_shard() on; unset: as they are. Full state dicts hold the dtype they had.
  std::optional<at::ScalarType> buffer_dtype = std::nullopt;
  /// While its module is in evaluation mode (eval()), a unit gathers and computes in its parameters' own dtype.
  bool full_precision_in_eval = false;
  /// Shards get their gradients in reduce_dtype.
  bool keep_low_precision_grads = false;
  /// Modules that shard_by_policy() makes units in float32, because their statistics need it.
  std::function<bool(const torch::nn::Module& module)> is_full_precision_module = is_batch_norm;
};

/// Whether parameters are freed between forward and backward, or over how many ranks they stay cut meanwhile: a number
/// that divides the ranks, of which neighbours hold a whole parameter together.
class ReshardAfterForward {
 public:
  template <std::same_as<bool> Flag>
  ReshardAfterForward(Flag reshards) : ranks_(reshards ? kAll : 1) {}  // NOLINT(google-explicit-constructor)
  template <std::same_as<int> Count>
  ReshardAfterForward(Count ranks) : ranks_(ranks), is_count_(true) {}  // NOLINT(google-explicit-constructor)

  static constexpr int kAll = -1;
  /// kAll: freed. 1: kept whole.
  int ranks() const { return ranks_; }
  bool is_count() const { return is_count_; }
  bool operator==(const ReshardAfterForward&) const = default;

 private:
  int ranks_;
  bool is_count_ = false;
};

/// Python's older names. Full shard and shard grad op are reshard_after_forward true and false; the hybrid ones the
/// same on a mesh of two axes; no shard divides nothing and reduces like DDP.
enum class ShardingStrategy { kFullShard, kShardGradOp, kNoShard, kHybridShard, kHybridShardZero2 };

/// When backward gathers the unit it needs next: before or after the gradients of this one, or when it is touched.
enum class BackwardPrefetch { kBackwardPre, kBackwardPost, kNone };

/// Shards, their gradients and with them the optimizer's state live in host memory.
struct CPUOffloadPolicy {
  bool pin_memory = true;
};

/// Where a parameter is cut, and over which ranks. A dim above 0 must divide evenly; negative ones count from the end.
struct ShardPlacement {
  int64_t dim = 0;
  /// Unset: the unit's.
  std::optional<DeviceMesh> mesh = std::nullopt;
  /// How many rows each rank that shards has, the same on all ranks; together all. For dim 0. Empty: each as many as
  /// the first one until they run out. Others cost a copy per gather, and room as if all had the most.
  std::vector<int64_t> rows = {};
};

/// Which axes of a mesh are for data, by name; several of one kind are flattened. With replicate alone nothing is
/// divided.
struct DataParallelMeshDims {
  std::vector<std::string> shard = {};
  std::vector<std::string> replicate = {};
};

struct FullyShardOptions {
  /// One axis shards; of two, which must have names, the first replicates and the second shards. Unset: one axis over
  /// the default group. Parameters may be cut by tensor parallelism on another slice of the same mesh (layout_of()).
  std::optional<DeviceMesh> mesh = std::nullopt;
  /// Given: `mesh` is the one that all parameters are on, with these axes, on which they are Replicate, and others.
  std::optional<DataParallelMeshDims> dp_mesh_dims = std::nullopt;
  /// Unset: yes, but not those of the root, which backward would gather at once.
  std::optional<ReshardAfterForward> reshard_after_forward = std::nullopt;
  /// With a number in reshard_after_forward: what its neighbours keep serves later forwards as well, until gradients
  /// are reduced or a shard is written. So an accumulation, or an evaluation, gathers over all ranks once, as on a
  /// hybrid mesh, and optimizer state is divided over all of them nevertheless.
  bool keep_parts = false;
  /// Asked for every parameter by the name its module has for it; nothing: dim 0 on the unit's mesh. Unset: for all.
  std::function<std::optional<ShardPlacement>(const std::string& name, const at::Tensor& parameter)>
      shard_placement_fn = nullptr;
  /// Divides rows that do not divide evenly by bytes, for parameters for which no rows are given. Unset: the first
  /// ranks have more. Of no effect on flat parameters, which are cut by element, and on those whose rows tensor
  /// parallelism has cut.
  std::shared_ptr<ShardBalance> balance = nullptr;
  MixedPrecisionPolicy mp_policy = {};
  std::optional<CPUOffloadPolicy> offload_policy = std::nullopt;
  /// These stay as they are: not sharded, and their gradients are not reduced. Parameters, or modules with all that is
  /// below them.
  std::vector<at::Tensor> ignored_params = {};
  std::vector<std::shared_ptr<torch::nn::Module>> ignored_modules = {};

  // As FullyShardedDataParallel has them.
  std::optional<ShardingStrategy> sharding_strategy = std::nullopt;
  /// False: the unit registers one flat parameter instead of its own, cut evenly by element.
  bool use_orig_params = true;
  /// Rank 0's parameters and buffers are sent to all before they are cut.
  bool sync_module_states = false;
  /// Fills modules with parameters or buffers of their own that have no memory yet: on the meta device, or deferred.
  /// Unset: deferred ones get the values they were built with, others are refused.
  std::function<void(torch::nn::Module& module)> param_init_fn = nullptr;
  /// Where parameters and buffers go first. Unset: to the mesh's kind of device.
  std::optional<at::Device> device_id = std::nullopt;
  /// The unit that comes next is gathered while this one computes.
  bool forward_prefetch = true;
  BackwardPrefetch backward_prefetch = BackwardPrefetch::kBackwardPre;
  /// At most one unit is gathered ahead; otherwise all that the order of the last pass has behind this one.
  bool limit_all_gathers = true;

  /// Ranks of one host read each other's parameters where they are, over backend shm: gathers copy next to nothing, and
  /// backward waits for none. Costs as much memory as the shards once more, in the dtype of the gather, and spares that
  /// of whole parameters.
  bool share_on_host = true;

  /// Gathers and reduces also where one rank holds all: for tests and measurements.
  bool force_sharding = false;
};

}  // namespace lockstep
