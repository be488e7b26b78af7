// Compiled where CMake found no NCCL: the name stays unknown, and asking for it lists what there is.
#include "lockstep/comm/builtin_backends.h"

namespace lockstep::detail {

std::optional<BackendFactory> nccl_backend_factory() {
  return std::nullopt;
}

}  // namespace lockstep::detail
