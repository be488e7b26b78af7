// The agent of this process, while RPC is initialised. Internal to rpc.
#pragma once

#include <torch/csrc/distributed/rpc/rpc_agent.h>

#include <memory>
#include <string>

namespace lockstep::rpc::detail {

class SwitchedAgent;

/// Null before the first init_rpc().
std::shared_ptr<SwitchedAgent>& switched_agent();
bool is_initialised();
/// How often RPC was initialised. References belong to one.
int session_number();
void begin_session();

/// Throws, naming what needs it, unless RPC is initialised.
std::shared_ptr<torch::distributed::rpc::RpcAgent> current_agent(const char* what);

/// "'worker0' (rank 0), 'worker1' (rank 1)"
std::string known_workers();

}  // namespace lockstep::rpc::detail
