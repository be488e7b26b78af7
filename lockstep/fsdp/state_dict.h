// The state of a sharded module by name.
//
//   full_state_dict()      whole tensors: what an unsharded module, or DDP, would save. Collective
//   sharded_state_dict()   this rank's parts, and where they belong. Local
//
// Both load into a module that is sharded over any number of ranks, or not at all. For files see fsdp/sharded_files.h.
// torch::save() of the module writes this rank's shards as they are, for the same number of ranks. What flat parameters
// consist of has its own names in whole state; in parts it is one tensor, for modules with the same flat parameters.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "lockstep/state/sharded_state.h"

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
  /// Parameters that do not require gradients are left out.
  bool ignore_frozen_params = false;
};

/// Copies of all parameters, gathered, and buffers. Collective: all ranks of the units' meshes call it.
ModuleState full_state_dict(const torch::nn::Module& module, const FullStateOptions& options = {});

struct LoadFullStateOptions {
  /// Names that are missing or unknown are an error that lists them; otherwise they are passed over.
  bool strict = true;
  /// Only rank 0 of the mesh has the state; the others give an empty map. Collective then, otherwise local.
  bool broadcast_from_rank0 = false;
  /// Parameters that do not require gradients may be missing, and stay as they are.
  bool ignore_frozen_params = false;
};

/// Puts whole tensors into the shards and buffers, each rank its part. Nothing is changed if a name or a size does not
/// fit.
void load_full_state_dict(torch::nn::Module& module, const ModuleState& state,
                          const LoadFullStateOptions& options = {});

struct ShardedStateOptions {
  bool ignore_frozen_params = false;
};

/// Shards, with mesh, placements and global sizes, and buffers. Local; tensors are the module's own, not copies.
ShardedModuleState sharded_state_dict(const torch::nn::Module& module, const ShardedStateOptions& options = {});

struct LoadShardedStateOptions {
  bool strict = true;
  bool ignore_frozen_params = false;
};

/// Loads what this rank has saved, on as many ranks as then: another layout is refused, naming both. Local.
void load_sharded_state_dict(torch::nn::Module& module, const ShardedModuleState& state,
                             const LoadShardedStateOptions& options = {});
/// Loads what any number of ranks has saved: `parts` are those of all of them, and this rank takes what it needs.
/// Local.
void load_sharded_state_dict(torch::nn::Module& module, const std::vector<ShardedModuleState>& parts,
                             const LoadShardedStateOptions& options = {});

namespace detail {

/// The second form, one part after the other, so that they need not be there at once. Refers to the module.
class ModuleStateLoader {
 public:
  ModuleStateLoader(torch::nn::Module& module, const LoadShardedStateOptions& options);
  ~ModuleStateLoader();
  ModuleStateLoader(const ModuleStateLoader&) = delete;
  ModuleStateLoader& operator=(const ModuleStateLoader&) = delete;

  void add(const ShardedModuleState& part);
  /// Throws if something is missing or unknown.
  void check() const;
  /// After check(): changes the module.
  void finish();

 private:
  struct Wanted;
  std::map<std::string, Wanted> wanted_;
  std::set<std::string> unknown_;
  const LoadShardedStateOptions options_;
};

}  // namespace detail
}  // namespace lockstep
