#include "lockstep/comm/call_backend.h"

namespace lockstep {
namespace {

/// By its old name, which all releases know: the supplement is not NCCL's alone any more.
double premul_factor(const c10d::ReduceOp& op) {
  const auto* premul = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK(premul != nullptr, "premul_sum carries no factor");
  return premul->tensor_factor.defined() ? premul->tensor_factor.item<double>() : premul->double_factor;
}

/// A call with the options every operation has.
template <class Options>
Call call_of(CallKind kind, const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& outputs,
             const Options& options) {
  Call call{.kind = kind, .inputs = inputs, .outputs = outputs, .timeout = options.timeout};
  if constexpr (requires { options.reduceOp; }) {
    call.op = options.reduceOp.op_;
    if (call.op == ReduceOp::PREMUL_SUM) call.factor = premul_factor(options.reduceOp);
  }
  if constexpr (requires { options.rootRank; }) call.root = static_cast<int>(options.rootRank);
  call.is_async = options.asyncOp;
  return call;
}

void check_one(const std::vector<at::Tensor>& tensors, const char* operation) {
  TORCH_CHECK(tensors.size() == 1, operation, " takes one tensor, got ", tensors.size());
}

std::vector<at::Tensor> only_list(const std::vector<std::vector<at::Tensor>>& lists, const char* operation) {
  TORCH_CHECK(lists.size() <= 1, operation, " takes one list of tensors, got ", lists.size());
  return lists.empty() ? std::vector<at::Tensor>{} : lists[0];
}

}  // namespace

CallBackend::WorkPtr CallBackend::start(Call&& call) {
  if (call.timeout == c10d::kUnsetTimeout) call.timeout = options_->timeout;
  TORCH_CHECK(call.op != ReduceOp::PREMUL_SUM || takes_premul_sum(), "backend ", name_, " does not support premul_sum");
  return submit(std::move(call));
}

CallBackend::WorkPtr CallBackend::check_and_submit(Call call) {
  const auto problem = find_problem(call, rank_, size_);
  TORCH_CHECK(!problem, name_of(call.kind), ": ", *problem);
  return start(std::move(call));
}

CallBackend::WorkPtr CallBackend::broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options) {
  check_one(tensors, "broadcast");
  return check_and_submit(call_of(CallKind::kBroadcast, tensors, {}, options));
}

CallBackend::WorkPtr CallBackend::allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) {
  check_one(tensors, "all_reduce");
  return check_and_submit(call_of(CallKind::kAllReduce, tensors, {}, options));
}

CallBackend::WorkPtr CallBackend::allreduce_coalesced(std::vector<at::Tensor>& tensors,
                                                      const c10d::AllreduceCoalescedOptions& options) {
  return check_and_submit(call_of(CallKind::kAllReduce, tensors, {}, options));
}

CallBackend::WorkPtr CallBackend::reduce(std::vector<at::Tensor>& tensors, const c10d::ReduceOptions& options) {
  check_one(tensors, "reduce");
  return check_and_submit(call_of(CallKind::kReduce, tensors, {}, options));
}

CallBackend::WorkPtr CallBackend::allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                            std::vector<at::Tensor>& inputs, const c10d::AllgatherOptions& options) {
  check_one(inputs, "all_gather");
  return check_and_submit(call_of(CallKind::kAllGather, inputs, only_list(outputs, "all_gather"), options));
}

CallBackend::WorkPtr CallBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                  const c10d::AllgatherOptions& options) {
  return check_and_submit(call_of(CallKind::kAllGatherSingle, {input}, {output}, options));
}

CallBackend::WorkPtr CallBackend::allgather_into_tensor_coalesced(std::vector<at::Tensor>& outputs,
                                                                  std::vector<at::Tensor>& inputs,
                                                                  const c10d::AllgatherOptions& options) {
  return check_and_submit(call_of(CallKind::kAllGatherSingle, inputs, outputs, options));
}

CallBackend::WorkPtr CallBackend::allgather_coalesced(std::vector<std::vector<at::Tensor>>& outputs,
                                                      std::vector<at::Tensor>& inputs,
                                                      const c10d::AllgatherOptions& options) {
  std::vector<at::Tensor> all;
  for (const auto& list : outputs) all.insert(all.end(), list.begin(), list.end());
  return check_and_submit(call_of(CallKind::kAllGather, inputs, all, options));
}

CallBackend::WorkPtr CallBackend::gather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                                         const c10d::GatherOptions& options) {
  check_one(inputs, "gather");
  return check_and_submit(call_of(CallKind::kGather, inputs, only_list(outputs, "gather"), options));
}

CallBackend::WorkPtr CallBackend::scatter(std::vector<at::Tensor>& outputs,
                                          std::vector<std::vector<at::Tensor>>& inputs,
                                          const c10d::ScatterOptions& options) {
  check_one(outputs, "scatter");
  return check_and_submit(call_of(CallKind::kScatter, only_list(inputs, "scatter"), outputs, options));
}

CallBackend::WorkPtr CallBackend::reduce_scatter(std::vector<at::Tensor>& outputs,
                                                 std::vector<std::vector<at::Tensor>>& inputs,
                                                 const c10d::ReduceScatterOptions& options) {
  check_one(outputs, "reduce_scatter");
  return check_and_submit(call_of(CallKind::kReduceScatter, only_list(inputs, "reduce_scatter"), outputs, options));
}

CallBackend::WorkPtr CallBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                       const c10d::ReduceScatterOptions& options) {
  return check_and_submit(call_of(CallKind::kReduceScatterSingle, {input}, {output}, options));
}

CallBackend::WorkPtr CallBackend::reduce_scatter_tensor_coalesced(std::vector<at::Tensor>& outputs,
                                                                  std::vector<at::Tensor>& inputs,
                                                                  const c10d::ReduceScatterOptions& options) {
  return check_and_submit(call_of(CallKind::kReduceScatterSingle, inputs, outputs, options));
}

CallBackend::WorkPtr CallBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                                                const c10d::AllToAllOptions& options) {
  auto call = call_of(CallKind::kAllToAllSingle, {input}, {output}, options);
  call.input_splits = input_splits;
  call.output_splits = output_splits;
  return check_and_submit(std::move(call));
}

CallBackend::WorkPtr CallBackend::alltoall(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                                           const c10d::AllToAllOptions& options) {
  return check_and_submit(call_of(CallKind::kAllToAll, inputs, outputs, options));
}

CallBackend::WorkPtr CallBackend::barrier(const c10d::BarrierOptions& options) {
  return check_and_submit(call_of(CallKind::kBarrier, {}, {}, options));
}

}  // namespace lockstep
