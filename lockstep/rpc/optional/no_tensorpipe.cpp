#include <c10/util/Exception.h>

#include "lockstep/rpc/tensorpipe.h"

namespace lockstep::rpc::detail {

bool has_tensorpipe() {
  return false;
}

void check_tensorpipe_options(const RpcOptions& options) {
  TORCH_CHECK(!options.transports && !options.channels,
              "[lockstep/rpc] this libtorch has no TensorPipe: transports and channels cannot be chosen.");
}

std::shared_ptr<torch::distributed::rpc::RpcAgent> make_tensorpipe_agent(
    const AgentRequest& /*request*/, std::unique_ptr<torch::distributed::rpc::RequestCallback> /*callback*/) {
  TORCH_CHECK(false, "[lockstep/rpc] this libtorch has no TensorPipe: only workers of one host can call each other.");
}

void update_membership(torch::distributed::rpc::RpcAgent& /*agent*/, const WorkerInfo& /*worker*/, bool /*joins*/) {
  TORCH_CHECK(false, "[lockstep/rpc] this libtorch has no TensorPipe: groups have a size.");
}

}  // namespace lockstep::rpc::detail
