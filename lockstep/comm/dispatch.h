// A Call through c10d's functions, for backends that are not ours. Internal to comm.
#pragma once

#include "lockstep/comm/backend_traits.h"
#include "lockstep/comm/call.h"

namespace lockstep::detail {

/// Runs `call`, which is well formed. The single-tensor forms are shown as flat contiguous tensors.
c10::intrusive_ptr<c10d::Work> dispatch_through_c10d(c10d::Backend& backend, Call call, const BackendTraits& traits);

}  // namespace lockstep::detail
