// Tensors in memory that all ranks of this process's shared-memory groups have mapped. Internal to comm.
#pragma once

#include <c10/core/Allocator.h>

#include <memory>

#include "lockstep/shm/team.h"

namespace lockstep::detail {

/// Lives for good. Among threads it is the ordinary CPU allocator: they reach each other's memory anyway. Thread-safe;
/// what it hands out keeps the mapping alive, also beyond the group.
c10::Allocator* shm_allocator(const shm::Team& team);

}  // namespace lockstep::detail
