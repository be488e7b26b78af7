// Random numbers that all ranks of a mesh draw alike. Internal to dtensor and tp.
#pragma once

#include <ATen/core/Generator.h>

#include <optional>

#include "lockstep/mesh/device_mesh.h"

namespace lockstep::detail {

/// What to draw from where the program names no generator: the default one of the device. The first time on a mesh all
/// its ranks take over the state of the first one's, as Python's DTensor does, warned if it was another. Ranks that are
/// threads of one process share that generator and would take numbers from each other: each gets one of its own, in the
/// same state. Collective over the mesh the first time. REQUIRES: this rank is in the mesh.
at::Generator mesh_generator(const DeviceMesh& mesh, at::Device device);

}  // namespace lockstep::detail
