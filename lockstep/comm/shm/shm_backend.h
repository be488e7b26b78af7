// The shared-memory collectives of shm/ as a c10d backend for CPU tensors. Internal to comm: ask the registry for
// "shm".
#pragma once

#include <memory>
#include <mutex>

#include "lockstep/comm/call_backend.h"
#include "lockstep/comm/shm/call_queue.h"
#include "lockstep/shm/collective.h"
#include "lockstep/shm/messages.h"
#include "lockstep/shm/team.h"

namespace lockstep::detail {

class ShmBackend final : public CallBackend {
 public:
  ShmBackend(std::shared_ptr<shm::Team> team, std::chrono::milliseconds timeout);
  ~ShmBackend() override;

  /// Memory that the other ranks can reach: collectives on tensors in it need no copy.
  std::shared_ptr<c10::Allocator> getMemAllocator() override { return allocator_; }
  /// `size` elements.
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  bool supportsTensorAlloc(c10::DeviceIndex index) override;

  WorkPtr send(std::vector<at::Tensor>& tensors, int to, int tag) override;
  WorkPtr recv(std::vector<at::Tensor>& tensors, int from, int tag) override;
  WorkPtr recvAnysource(std::vector<at::Tensor>& tensors, int tag) override;

  void abort() override;
  void fail(const std::string& reason) override;
  void shutdown() override;
  /// False in a process forked off this rank's.
  bool is_at_home() const;
  /// What the ranks show each other.
  const std::shared_ptr<shm::Team>& team() const { return team_; }

 protected:
  WorkPtr submit(Call&& call) override;
  uint64_t sequence_number() const override;
  bool takes_premul_sum() const override { return true; }

 private:
  const std::shared_ptr<shm::Team> team_;
  const std::shared_ptr<shm::Collectives> collectives_;  // used by the queue's driver
  const std::shared_ptr<CallQueue> queue_;
  const std::shared_ptr<c10::Allocator> allocator_;
  const std::shared_ptr<shm::Messages> messages_;
  std::atomic<uint64_t> next_sequence_ = 0;
  std::once_flag closed_;
};

}  // namespace lockstep::detail
