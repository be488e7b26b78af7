// Placements as libtorch's own classes: for code that exchanges them with libtorch or with Python. Nothing else in the
// library needs them.
#pragma once

#include <memory>
#include <typeinfo>

#include <torch/csrc/distributed/Placement.h>

#include "lockstep/shard/placement.h"

namespace lockstep {

/// Refuses a RaggedShard, of which there is none.
std::unique_ptr<torch::distributed::Placement> to_torch(const Placement& placement);

/// Refuses a class it does not know, and a Partial whose reduction has no name here.
Placement from_torch(const torch::distributed::Placement& placement);

}  // namespace lockstep
