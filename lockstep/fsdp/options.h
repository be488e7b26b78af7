// How a module is sharded: the options of fully_shard(), under Python's names.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <optional>
#include <vector>

#include "lockstep/mesh/device_mesh.h"

namespace lockstep {

/// In which dtypes a unit gathers, computes and reduces. Shards, optimizer and state dicts keep theirs. Only floating
/// point parameters are cast.
struct MixedPrecisionPolicy {
  std::optional<at::ScalarType> param_dtype = std::nullopt;
  /// Of the reduction; unset: param_dtype.
  std::optional<at::ScalarType> reduce_dtype = std::nullopt;
};

struct FullyShardOptions {
  /// One axis shards; of two, which must have names, the first replicates and the second shards. Unset: one axis over
  /// the default group.
  std::optional<DeviceMesh> mesh = std::nullopt;
  /// Whether parameters are freed between forward and backward. Unset: yes, but not those of the root, which backward
  /// would gather at once.
  std::optional<bool> reshard_after_forward = std::nullopt;
  MixedPrecisionPolicy mp_policy = {};
  /// These stay as they are: not sharded, and their gradients are not reduced.
  std::vector<at::Tensor> ignored_params = {};
};

}  // namespace lockstep
