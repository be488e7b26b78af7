// The state of a sharded module as whole tensors by name: what an unsharded module, or DDP, would save.
//
// The sharded state needs no function: named_parameters() are the shards, each with its layout.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>

namespace torch::nn {
class Module;
}

namespace lockstep {

/// Parameters and buffers by dotted name.
using ModuleState = std::map<std::string, at::Tensor>;

struct FullStateOptions {
  /// Copies in host memory.
  bool cpu_offload = false;
  /// Ranks other than 0 of the mesh get an empty map, and need no memory for it.
  bool rank0_only = false;
};

/// Copies of all parameters, gathered, and buffers. Collective: all ranks of the units' meshes call it.
ModuleState full_state_dict(const torch::nn::Module& module, const FullStateOptions& options = {});

struct LoadFullStateOptions {
  /// Names that are missing or unknown are an error that lists them; otherwise they are passed over.
  bool strict = true;
  /// Only rank 0 of the mesh has the state; the others give an empty map. Collective then, otherwise local.
  bool broadcast_from_rank0 = false;
};

/// Puts whole tensors into the shards and buffers, each rank its part. Nothing is changed if a name or a size does not
/// fit.
void load_full_state_dict(torch::nn::Module& module, const ModuleState& state,
                          const LoadFullStateOptions& options = {});

}  // namespace lockstep
