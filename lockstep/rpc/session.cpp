#include "lockstep/rpc/session.h"

#include <atomic>

#include "lockstep/base/str.h"
#include "lockstep/rpc/switched_agent.h"

namespace lockstep::rpc::detail {

std::shared_ptr<SwitchedAgent>& switched_agent() {
  static auto* const agent = new std::shared_ptr<SwitchedAgent>;
  return *agent;
}

namespace {
std::atomic<int> sessions = 0;
}

int session_number() {
  return sessions;
}

void begin_session() {
  ++sessions;
}

bool is_initialised() {
  const auto& agent = switched_agent();
  return agent && agent->real();
}

std::shared_ptr<torch::distributed::rpc::RpcAgent> current_agent(const char* what) {
  TORCH_CHECK(is_initialised(), "[lockstep/rpc] RPC is not initialised: ", what, " needs init_rpc() before it, and no ",
              "shutdown().");
  return switched_agent();
}

std::string known_workers() {
  std::vector<std::string> names;
  for (const auto& info : current_agent("a worker's name")->getWorkerInfos()) {
    names.push_back(str("'", info.name_, "' (rank ", info.id_, ")"));
  }
  return join(names, ", ");
}

}  // namespace lockstep::rpc::detail
