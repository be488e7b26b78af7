#include "lockstep/rpc/switched_agent.h"

#include <torch/csrc/distributed/rpc/rref_proto.h>

#include <future>

#include "lockstep/rpc/shm_agent.h"

namespace lockstep::rpc::detail {

namespace trpc = torch::distributed::rpc;

SwitchedAgent::SwitchedAgent(trpc::WorkerInfo self)
    : RpcAgent(std::move(self), /*cb=*/nullptr, std::chrono::seconds(60)) {}

void SwitchedAgent::switch_to(std::shared_ptr<RpcAgent> agent) {
  const std::unique_lock lock(mutex_);
  shm_agent_ = std::dynamic_pointer_cast<ShmAgent>(agent);
  agent_ = std::move(agent);
}

bool SwitchedAgent::wait(trpc::JitFuture& future, float timeout_seconds) {
  std::shared_ptr<ShmAgent> agent;
  {
    const std::shared_lock lock(mutex_);
    agent = shm_agent_;
  }
  if (agent) {
    agent->wait(future);
    return true;
  }
  if (timeout_seconds == trpc::kUnsetRpcTimeout) {
    timeout_seconds = std::chrono::duration<float>(getRpcTimeout()).count();
  }
  if (timeout_seconds <= 0 || future.completed()) {
    future.wait();
    return true;
  }
  // Later than the agent's own word, which is told where the call stands.
  constexpr std::chrono::duration<float> kGrace(0.5F);
  const auto done = std::make_shared<std::promise<void>>();
  future.addCallback([done](trpc::JitFuture&) { done->set_value(); }, /*uses_future=*/false);
  if (done->get_future().wait_for(std::chrono::duration<float>(timeout_seconds) + kGrace) !=
      std::future_status::ready) {
    return false;
  }
  future.wait();  // it is there; but streams of GPUs wait for it here
  return true;
}

std::shared_ptr<trpc::RpcAgent> SwitchedAgent::real() const {
  const std::shared_lock lock(mutex_);
  return agent_;
}

std::shared_ptr<trpc::RpcAgent> SwitchedAgent::required() const {
  auto agent = real();
  TORCH_CHECK(agent, "[lockstep/rpc] RPC is not initialised: it has been shut down.");
  return agent;
}

c10::intrusive_ptr<trpc::JitFuture> SwitchedAgent::send(const trpc::WorkerInfo& to,
                                                        c10::intrusive_ptr<trpc::Message> message,
                                                        float timeout_seconds, const trpc::DeviceMap& device_map) {
  std::shared_ptr<trpc::RpcAgent> agent;
  std::shared_ptr<const SendHook> hook;
  {
    const std::shared_lock lock(mutex_);
    agent = agent_;
    hook = send_hook_;
  }
  if (hook) {
    try {
      (*hook)(to, *message);
    } catch (...) {
      auto lost = c10::make_intrusive<trpc::JitFuture>(c10::getCustomClassType<c10::intrusive_ptr<trpc::Message>>());
      lost->setError(std::current_exception());
      return lost;
    }
  }
  if (!agent && message->type() == trpc::MessageType::RREF_USER_DELETE) {
    // A reference outlived RPC: nobody counts it any more.
    auto done = c10::make_intrusive<trpc::JitFuture>(c10::getCustomClassType<c10::intrusive_ptr<trpc::Message>>());
    done->markCompleted(c10::IValue(trpc::RRefAck().toMessage()));
    return done;
  }
  if (timeout_seconds == trpc::kUnsetRpcTimeout) {
    timeout_seconds = std::chrono::duration<float>(getRpcTimeout()).count();
  }
  // What libtorch sends by itself is small, and others wait for it.
  const bool is_call = message->type() == trpc::MessageType::SCRIPT_CALL ||
                       message->type() == trpc::MessageType::SCRIPT_REMOTE_CALL ||
                       message->type() == trpc::MessageType::FORWARD_AUTOGRAD_REQ;
  if (!is_call || !limits_flow_) return required()->send(to, std::move(message), timeout_seconds, device_map);
  std::size_t bytes = message->payload().size();
  for (const auto& tensor : message->tensors()) bytes += tensor.numel() * tensor.element_size();
  flow_->take(to.id_, bytes);
  try {
    auto answer = required()->send(to, std::move(message), timeout_seconds, device_map);
    answer->addCallback([flow = flow_, worker = to.id_, bytes](trpc::JitFuture&) { flow->give_back(worker, bytes); });
    return answer;
  } catch (...) {
    flow_->give_back(to.id_, bytes);
    throw;
  }
}

void SwitchedAgent::set_send_hook(SendHook hook) {
  const std::unique_lock lock(mutex_);
  send_hook_ = hook ? std::make_shared<const SendHook>(std::move(hook)) : nullptr;
}

void SwitchedAgent::limit_flow(std::size_t bytes) {
  flow_->set_limit(bytes);
  limits_flow_ = bytes > 0;
}

const trpc::WorkerInfo& SwitchedAgent::getWorkerInfo(const std::string& name) const {
  return required()->getWorkerInfo(name);
}
const trpc::WorkerInfo& SwitchedAgent::getWorkerInfo(trpc::worker_id_t id) const {
  return required()->getWorkerInfo(id);
}
std::vector<trpc::WorkerInfo> SwitchedAgent::getWorkerInfos() const {
  return required()->getWorkerInfos();
}
void SwitchedAgent::join(bool shutdown, float timeout) {
  required()->join(shutdown, timeout);
}
void SwitchedAgent::sync() {
  required()->sync();
}
void SwitchedAgent::startImpl() {
  required()->start();
}
void SwitchedAgent::shutdownImpl() {
  required()->shutdown();
}
std::unordered_map<std::string, std::string> SwitchedAgent::getMetrics() {
  return required()->getMetrics();
}
std::unordered_map<std::string, std::string> SwitchedAgent::getDebugInfo() {
  return required()->getDebugInfo();
}
trpc::DeviceMap SwitchedAgent::getDeviceMap(const trpc::WorkerInfo& to) const {
  return required()->getDeviceMap(to);
}

const std::vector<c10::Device>& SwitchedAgent::getDevices() const {
  static const std::vector<c10::Device> none;
  const auto agent = real();
  return agent ? agent->getDevices() : none;
}

void SwitchedAgent::addGilWaitTime(std::chrono::microseconds /*time*/) {}

}  // namespace lockstep::rpc::detail
