// FSDP over parameters that tensor parallelism has cut before. Modules compute with this rank's part of such a
// parameter, and that part is what a unit divides, gathers and reduces, over the axes for data alone; the layout of a
// shard says both, so that norms, state and files know the whole. Internal to fsdp.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lockstep/fsdp/member.h"
#include "lockstep/fsdp/options.h"

namespace lockstep::detail {

/// The layout of a shard: of `division` of this rank's part of a tensor that lies as `before` says. Data-parallel axes
/// come first, and a dim that both cut is a StridedShard there, as in Python. That is what was cut only if sizes divide
/// evenly: if they do not, axes stand in the order in which they have cut. Refuses meshes that were not cut from one.
Layout combined(const Layout& division, const Layout& before);

/// The mesh that shards and replicates, of the one mesh that the parameters are on. Collective over the world the first
/// time if axes have to be flattened.
DeviceMesh data_parallel_mesh(const DeviceMesh& spmd_mesh, const DataParallelMeshDims& dims);

/// How a parameter was cut before, on the axes that are not for data; none if it was not. `spmd_mesh`: the mesh it must
/// be on then, with all ranks for data alike.
std::optional<Layout> cut_before(const std::string& name, const at::Tensor& parameter, const FullyShardOptions& options,
                                 const std::optional<DeviceMesh>& spmd_mesh);

/// Along the dim that it is to be cut along now.
bool is_cut_twice(const WholeParameter& parameter);

/// Refuses, by name, to shard on `mesh` what was cut in a way that does not go with it.
void check_cut_before(const WholeParameter& parameter, const DeviceMesh& mesh, const FullyShardOptions& options);

}  // namespace lockstep::detail
