// Base of the backends we write ourselves: turns c10d's many virtual functions into one, submit(Call). The library does
// not go through them: launch() hands its Call to start(); they are for callers that know c10d alone.
// What c10d can ask and a Call cannot say (sparse, send, recv) keeps c10d's own refusal, which names the operation.
#pragma once

#include <functional>
#include <string>

#include "lockstep/comm/backend_traits.h"
#include "lockstep/comm/call.h"

namespace lockstep {

class CallBackend : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  CallBackend(int rank, int size, std::string name, std::chrono::milliseconds timeout)
      : Backend(rank, size),
        name_(std::move(name)),
        options_(c10::make_intrusive<c10d::Backend::Options>(name_, timeout)) {}

  const std::string getBackendName() const override { return name_; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }
  void setSequenceNumberForGroup() override {}
  /// Ends the group's collectives, those under way included, on all ranks that the backend can reach; their errors show
  /// `reason`. Local. The first reason stays.
  virtual void fail(const std::string& /*reason*/) {}
  uint64_t getSequenceNumberForGroup() override { return sequence_number(); }
  /// What launch() has to make up for; asked once for each group. What a registration states counts instead.
  virtual BackendTraits traits() const { return {}; }

  /// Starts `call`, of which find_problem() finds none. If it throws misuse, the call is as it was.
  WorkPtr start(Call&& call);

  WorkPtr broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(std::vector<at::Tensor>& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(std::vector<at::Tensor>& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                              const c10d::AllgatherOptions& options) override;
  WorkPtr gather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                 const c10d::GatherOptions& options) override;
  WorkPtr scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                  const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                   const c10d::AllToAllOptions& options) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;

 protected:
  /// Starts `call`, whose shape was checked; its timeout is set. Takes from it once nothing can be refused any more.
  virtual WorkPtr submit(Call&& call) = 0;
  virtual uint64_t sequence_number() const = 0;
  virtual bool takes_premul_sum() const { return false; }
  std::chrono::milliseconds default_timeout() const { return options_->timeout; }

 private:
  WorkPtr check_and_submit(Call call);

  // Fixed after construction.
  const std::string name_;
  const c10::intrusive_ptr<c10d::Backend::Options> options_;
};

}  // namespace lockstep
