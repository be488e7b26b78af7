#include "lockstep/rpc/tensorpipe.h"

#include <ATen/Context.h>
#include <torch/csrc/distributed/rpc/tensorpipe_agent.h>

namespace lockstep::rpc::detail {

namespace trpc = torch::distributed::rpc;

namespace {

trpc::TensorPipeRpcBackendOptions tensorpipe_options(const RpcOptions& options, std::vector<c10::Device> devices) {
  return {options.num_worker_threads, options.transports,  options.channels,  options.rpc_timeout.count(),
          options.init_method,        options.device_maps, std::move(devices)};
}

}  // namespace

bool has_tensorpipe() {
  return true;
}

void check_tensorpipe_options(const RpcOptions& options) {
  tensorpipe_options(options, {});
}

std::shared_ptr<trpc::RpcAgent> make_tensorpipe_agent(const AgentRequest& request,
                                                      std::unique_ptr<trpc::RequestCallback> callback) {
  // TensorPipe allocates what arrives there, also if this process has not used the device before.
  for (const auto& device : request.devices) at::globalContext().lazyInitDevice(device.type());
  return std::make_shared<trpc::TensorPipeAgent>(request.store, request.name,
                                                 static_cast<trpc::worker_id_t>(request.rank), request.world_size,
                                                 tensorpipe_options(request.options, request.devices),
                                                 request.reverse_device_maps, request.devices, std::move(callback));
}

void update_membership(trpc::RpcAgent& agent, const WorkerInfo& worker, bool joins) {
  auto* const tensorpipe = dynamic_cast<trpc::TensorPipeAgent*>(&agent);
  TORCH_CHECK(tensorpipe != nullptr && !tensorpipe->isStaticGroup_,
              "the group here has a size: all workers must begin ", "without one");
  tensorpipe->updateGroupMembership(worker, {}, {}, joins);
}

}  // namespace lockstep::rpc::detail
