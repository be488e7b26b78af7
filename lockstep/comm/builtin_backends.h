// The factories behind the built-in names. NCCL's is in a file CMake chooses: where it is missing, the name is not
// registered. Internal to comm.
#pragma once

#include <optional>

#include "lockstep/comm/backend_registry.h"

namespace lockstep::detail {

BackendPtr make_gloo_backend(const BackendRequest& request);
BackendPtr make_shm_backend(const BackendRequest& request);
BackendPtr make_thread_backend(const BackendRequest& request);
/// Empty if this build has no NCCL.
std::optional<BackendFactory> nccl_backend_factory();

}  // namespace lockstep::detail
