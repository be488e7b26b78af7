// What fully_shard() does to modules before their parameters are cut: which parameters, on which mesh and device, with
// which values. Internal to fsdp.
#pragma once

#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "lockstep/fsdp/member.h"
#include "lockstep/fsdp/options.h"
#include "lockstep/fsdp/unit.h"

namespace lockstep::detail {

/// The options with a mesh, and what follows from a strategy. Refuses what contradicts itself. Collective if groups
/// have to be made.
FullyShardOptions completed(FullyShardOptions options, const torch::nn::Module& module);

/// What belongs to a unit of `modules`.
struct Below {
  std::vector<UnitPtr> units;                                       // right below
  std::vector<std::pair<std::string, torch::nn::Module*>> modules;  // of no other unit, by name
};
Below below(const std::vector<std::shared_ptr<torch::nn::Module>>& modules, const FullyShardOptions& options);

/// Gives memory, values and a place to what is on no unit's device yet. Collective with sync_module_states.
void prepare(const Below& below, const FullyShardOptions& options);

/// Each parameter once, with the mesh it is cut on. Checked: what cannot be cut is refused by name. `spmd_mesh`: the
/// one that options with dp_mesh_dims had before they were completed.
std::vector<std::pair<DeviceMesh, WholeParameter>> parameters_in(const Below& below, const FullyShardOptions& options,
                                                                 const std::optional<DeviceMesh>& spmd_mesh);

/// Registers shards in the place of the parameters.
void put_shards(const Below& below, Unit& unit);

/// The group of this rank in which an integer reshard_after_forward keeps parameters; null without. Collective over the
/// world the first time.
GroupPtr group_between(const FullyShardOptions& options);

}  // namespace lockstep::detail
