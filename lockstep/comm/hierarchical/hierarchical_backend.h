// A Hierarchy as a c10d backend for CPU tensors. Internal to comm: the registry's "shm" becomes this where the ranks of
// a group are on several hosts.
#pragma once

#include <memory>
#include <mutex>

#include "lockstep/comm/call_backend.h"
#include "lockstep/comm/hierarchical/hierarchy.h"
#include "lockstep/comm/shm/call_queue.h"

namespace lockstep::detail {

class HierarchicalBackend final : public CallBackend {
 public:
  /// `who` begins messages: "[lockstep/comm] rank 1 of 4".
  HierarchicalBackend(std::shared_ptr<Hierarchy> hierarchy, int rank, int size, std::string who,
                      std::chrono::milliseconds timeout);
  ~HierarchicalBackend() override;

  // Between two ranks there is no hierarchy.
  WorkPtr send(std::vector<at::Tensor>& tensors, int to, int tag) override;
  WorkPtr recv(std::vector<at::Tensor>& tensors, int from, int tag) override;
  WorkPtr recvAnysource(std::vector<at::Tensor>& tensors, int tag) override;

  /// Memory that the ranks of this host share.
  std::shared_ptr<c10::Allocator> getMemAllocator() override { return hierarchy_->local().getMemAllocator(); }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  bool supportsTensorAlloc(c10::DeviceIndex index) override;

  void abort() override;
  void shutdown() override;
  /// The ranks of one host see who is missing there; the others have to be told.
  BackendTraits traits() const override { return {.names_missing_ranks = false}; }

 protected:
  WorkPtr submit(Call&& call) override;
  uint64_t sequence_number() const override { return next_sequence_; }
  bool takes_premul_sum() const override { return true; }

 private:
  const std::shared_ptr<Hierarchy> hierarchy_;  // run by the queue's driver
  const std::shared_ptr<CallQueue> queue_;
  const std::string who_;
  std::atomic<uint64_t> next_sequence_ = 0;
  std::once_flag closed_;
};

}  // namespace lockstep::detail
