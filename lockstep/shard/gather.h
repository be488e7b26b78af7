// A whole tensor out of the parts that ranks hold, by its layout; and one rank's tensor for all of a mesh.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "lockstep/shard/layout.h"

namespace lockstep {

/// The whole tensor of which `part` is this rank's; a copy also where nothing is divided. Blocking and collective over
/// the axes that divide it. Refuses terms of a reduction.
at::Tensor gather_whole(const at::Tensor& part, const Layout& layout);

/// What the mesh's first rank has, on all of its ranks: in place, or the bytes. Blocking and collective over the mesh.
void broadcast_over(const DeviceMesh& mesh, const at::Tensor& tensor);
std::string broadcast_over(const DeviceMesh& mesh, std::string bytes);

/// The mesh with most ranks that one of the tensors is on, by its layout; none if they carry none.
std::optional<DeviceMesh> largest_mesh(const std::vector<at::Tensor>& tensors);
/// Whether this is the mesh's first rank, who speaks for all; without a mesh it is.
bool is_first_rank(const std::optional<DeviceMesh>& mesh);

}  // namespace lockstep
