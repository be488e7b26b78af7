// libtorch's TensorPipe agent, where the libtorch at hand has it. Internal to rpc.
#pragma once

#include <torch/csrc/distributed/rpc/request_callback.h>
#include <torch/csrc/distributed/rpc/rpc_agent.h>

#include <memory>
#include <string>

#include "lockstep/rpc/rpc.h"

namespace lockstep::rpc::detail {

struct AgentRequest {
  StorePtr store;
  std::string name;
  int rank = 0;
  std::optional<int> world_size = 1;
  RpcOptions options;
  /// By caller: the inverse of its map to this worker.
  std::unordered_map<std::string, DeviceMap> reverse_device_maps = {};
  std::vector<c10::Device> devices = {};
};

bool has_tensorpipe();

/// Throws c10::Error for a transport or channel that it does not know.
void check_tensorpipe_options(const RpcOptions& options);

std::shared_ptr<torch::distributed::rpc::RpcAgent> make_tensorpipe_agent(
    const AgentRequest& request, std::unique_ptr<torch::distributed::rpc::RequestCallback> callback);

/// A worker has come to the group of this agent, which has no size, or has left it.
void update_membership(torch::distributed::rpc::RpcAgent& agent, const WorkerInfo& worker, bool joins);

}  // namespace lockstep::rpc::detail
