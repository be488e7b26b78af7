// Operations that move data and compute nothing, on a backend that knows few dtypes and wants equal contiguous tensors:
// shown to it as bytes. Internal to comm.
#pragma once

#include "lockstep/comm/call.h"
#include "lockstep/comm/deadline.h"

namespace lockstep::detail {

/// Runs a gather, scatter or all-to-all and blocks. Callers run below autograd.
void run_as_bytes(c10d::Backend& backend, const Call& call, const Deadline& deadline);

}  // namespace lockstep::detail
