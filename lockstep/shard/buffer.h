// Flat memory for what ranks exchange.
#pragma once

#include <ATen/core/Tensor.h>

#include "lockstep/comm/group.h"

namespace lockstep::detail {

/// A flat tensor that the group's backend reduces without a copy, if it has such memory; an ordinary one otherwise.
at::Tensor allocate_buffer(int64_t elements, const at::TensorOptions& options, const GroupPtr& group);

}  // namespace lockstep::detail
