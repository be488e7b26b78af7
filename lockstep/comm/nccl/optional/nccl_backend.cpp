// NCCL through c10d. Compiled where CMake found a CUDA libtorch and NCCL's headers.
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "lockstep/comm/builtin_backends.h"

namespace lockstep::detail {
namespace {

BackendPtr make_nccl_backend(const BackendRequest& request) {
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = request.timeout;
  options->group_name = request.group_name;
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(request.store, request.rank, request.size, options);
}

}  // namespace

std::optional<BackendFactory> nccl_backend_factory() {
  return make_nccl_backend;
}

}  // namespace lockstep::detail
