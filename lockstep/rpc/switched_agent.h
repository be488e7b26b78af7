// The agent libtorch sees. It lasts as long as the process, since libtorch's table of references keeps the first one it
// met for ever; behind it stands the agent that carries messages now, if RPC is initialised. Internal to rpc.
#pragma once

#include <torch/csrc/distributed/rpc/rpc_agent.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "lockstep/rpc/flow_limit.h"

namespace lockstep::rpc {
class ShmAgent;
}

namespace lockstep::rpc::detail {

class SwitchedAgent final : public torch::distributed::rpc::RpcAgent {
 public:
  explicit SwitchedAgent(torch::distributed::rpc::WorkerInfo self);

  /// Null: none. Neither started nor shut down by this.
  void switch_to(std::shared_ptr<torch::distributed::rpc::RpcAgent> agent);
  std::shared_ptr<torch::distributed::rpc::RpcAgent> real() const;
  /// future.wait() for the answer of a call that has this limit (as of send()), looking after the agent's mail
  /// meanwhile if it has any. False if there is none when it is over: TensorPipe tells of limits by threads of its
  /// pool, all of which may be waiting here.
  bool wait(torch::distributed::rpc::JitFuture& future, float timeout_seconds);

  /// Bytes of calls that may be on their way to one worker; zero: any number.
  void limit_flow(std::size_t bytes);
  std::size_t peak_flow() const { return flow_->peak(); }

  /// For tests of what is lost or late: runs before every message is sent, on the sender's thread. If it throws, the
  /// message is lost and its answer is that error. Null: none.
  using SendHook =
      std::function<void(const torch::distributed::rpc::WorkerInfo& to, const torch::distributed::rpc::Message&)>;
  void set_send_hook(SendHook hook);

  c10::intrusive_ptr<torch::distributed::rpc::JitFuture> send(
      const torch::distributed::rpc::WorkerInfo& to, c10::intrusive_ptr<torch::distributed::rpc::Message> message,
      float timeout_seconds, const torch::distributed::rpc::DeviceMap& device_map) override;
  const torch::distributed::rpc::WorkerInfo& getWorkerInfo(const std::string& name) const override;
  const torch::distributed::rpc::WorkerInfo& getWorkerInfo(torch::distributed::rpc::worker_id_t id) const override;
  std::vector<torch::distributed::rpc::WorkerInfo> getWorkerInfos() const override;
  void join(bool shutdown, float timeout) override;
  void sync() override;
  void startImpl() override;
  void shutdownImpl() override;
  std::unordered_map<std::string, std::string> getMetrics() override;
  std::unordered_map<std::string, std::string> getDebugInfo() override;
  torch::distributed::rpc::DeviceMap getDeviceMap(const torch::distributed::rpc::WorkerInfo& to) const override;
  const std::vector<c10::Device>& getDevices() const override;

 private:
  void addGilWaitTime(std::chrono::microseconds time) override;
  std::shared_ptr<torch::distributed::rpc::RpcAgent> required() const;

  // Shared with callbacks of calls that may outlive anything.
  const std::shared_ptr<FlowLimit> flow_ = std::make_shared<FlowLimit>();
  std::atomic<bool> limits_flow_ = false;
  mutable std::shared_mutex mutex_;
  std::shared_ptr<torch::distributed::rpc::RpcAgent> agent_;
  std::shared_ptr<ShmAgent> shm_agent_;  // the same, if it is one
  std::shared_ptr<const SendHook> send_hook_;
};

}  // namespace lockstep::rpc::detail
