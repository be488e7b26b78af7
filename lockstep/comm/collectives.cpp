#include "lockstep/comm/collectives.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include "lockstep/comm/group_state.h"

namespace lockstep {
namespace {

/// Misuse is refused here, before anything is communicated, so that it reads the same whichever backend would have
/// refused it.
Pending checked_launch(const Call& call, const GroupPtr& group) {
  const auto& state = detail::state_of(group);
  const auto problem = find_problem(call, state.description.rank, state.description.size);
  TORCH_CHECK(!problem, "[lockstep/comm] ", state.who(), ": ", name_of(call.kind), ": ", *problem);
  return launch(call, group);
}

/// Coalescing nothing is legal and does nothing, on every rank alike.
Pending coalesced(const Call& call, const GroupPtr& group) {
  if (call.inputs.empty() && call.outputs.empty()) return {};
  return checked_launch(call, group);
}

}  // namespace

Pending launch_all_reduce(const at::Tensor& tensor, const GroupPtr& group, ReduceOp op) {
  return checked_launch({.kind = CallKind::kAllReduce, .inputs = {tensor}, .op = op}, group);
}

void all_reduce(const at::Tensor& tensor, const GroupPtr& group, ReduceOp op) {
  launch_all_reduce(tensor, group, op).wait();
}

Pending launch_all_reduce_coalesced(const std::vector<at::Tensor>& tensors, const GroupPtr& group, ReduceOp op) {
  return coalesced({.kind = CallKind::kAllReduce, .inputs = tensors, .op = op}, group);
}

void all_reduce_coalesced(const std::vector<at::Tensor>& tensors, const GroupPtr& group, ReduceOp op) {
  launch_all_reduce_coalesced(tensors, group, op).wait();
}

Pending launch_reduce(const at::Tensor& tensor, int root, const GroupPtr& group, ReduceOp op) {
  return checked_launch({.kind = CallKind::kReduce, .inputs = {tensor}, .op = op, .root = root}, group);
}

void reduce(const at::Tensor& tensor, int root, const GroupPtr& group, ReduceOp op) {
  launch_reduce(tensor, root, group, op).wait();
}

Pending launch_broadcast(const at::Tensor& tensor, int root, const GroupPtr& group) {
  return checked_launch({.kind = CallKind::kBroadcast, .inputs = {tensor}, .root = root}, group);
}

void broadcast(const at::Tensor& tensor, int root, const GroupPtr& group) {
  launch_broadcast(tensor, root, group).wait();
}

Pending launch_all_gather(const std::vector<at::Tensor>& outputs, const at::Tensor& input, const GroupPtr& group) {
  return checked_launch({.kind = CallKind::kAllGather, .inputs = {input}, .outputs = outputs}, group);
}

void all_gather(const std::vector<at::Tensor>& outputs, const at::Tensor& input, const GroupPtr& group) {
  launch_all_gather(outputs, input, group).wait();
}

Pending launch_all_gather_into_tensor(const at::Tensor& output, const at::Tensor& input, const GroupPtr& group) {
  return checked_launch({.kind = CallKind::kAllGatherSingle, .inputs = {input}, .outputs = {output}}, group);
}

void all_gather_into_tensor(const at::Tensor& output, const at::Tensor& input, const GroupPtr& group) {
  launch_all_gather_into_tensor(output, input, group).wait();
}

Pending launch_all_gather_into_tensor_coalesced(const std::vector<at::Tensor>& outputs,
                                                const std::vector<at::Tensor>& inputs, const GroupPtr& group) {
  return coalesced({.kind = CallKind::kAllGatherSingle, .inputs = inputs, .outputs = outputs}, group);
}

void all_gather_into_tensor_coalesced(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                                      const GroupPtr& group) {
  launch_all_gather_into_tensor_coalesced(outputs, inputs, group).wait();
}

Pending launch_reduce_scatter(const at::Tensor& output, const std::vector<at::Tensor>& inputs, const GroupPtr& group,
                              ReduceOp op) {
  return checked_launch({.kind = CallKind::kReduceScatter, .inputs = inputs, .outputs = {output}, .op = op}, group);
}

void reduce_scatter(const at::Tensor& output, const std::vector<at::Tensor>& inputs, const GroupPtr& group,
                    ReduceOp op) {
  launch_reduce_scatter(output, inputs, group, op).wait();
}

Pending launch_reduce_scatter_tensor(const at::Tensor& output, const at::Tensor& input, const GroupPtr& group,
                                     ReduceOp op) {
  return checked_launch({.kind = CallKind::kReduceScatterSingle, .inputs = {input}, .outputs = {output}, .op = op},
                        group);
}

void reduce_scatter_tensor(const at::Tensor& output, const at::Tensor& input, const GroupPtr& group, ReduceOp op) {
  launch_reduce_scatter_tensor(output, input, group, op).wait();
}

Pending launch_reduce_scatter_tensor_coalesced(const std::vector<at::Tensor>& outputs,
                                               const std::vector<at::Tensor>& inputs, const GroupPtr& group,
                                               ReduceOp op) {
  return coalesced({.kind = CallKind::kReduceScatterSingle, .inputs = inputs, .outputs = outputs, .op = op}, group);
}

void reduce_scatter_tensor_coalesced(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                                     const GroupPtr& group, ReduceOp op) {
  launch_reduce_scatter_tensor_coalesced(outputs, inputs, group, op).wait();
}

Pending launch_gather(const at::Tensor& input, const std::vector<at::Tensor>& outputs, int root,
                      const GroupPtr& group) {
  return checked_launch({.kind = CallKind::kGather, .inputs = {input}, .outputs = outputs, .root = root}, group);
}

void gather(const at::Tensor& input, const std::vector<at::Tensor>& outputs, int root, const GroupPtr& group) {
  launch_gather(input, outputs, root, group).wait();
}

Pending launch_scatter(const at::Tensor& output, const std::vector<at::Tensor>& inputs, int root,
                       const GroupPtr& group) {
  return checked_launch({.kind = CallKind::kScatter, .inputs = inputs, .outputs = {output}, .root = root}, group);
}

void scatter(const at::Tensor& output, const std::vector<at::Tensor>& inputs, int root, const GroupPtr& group) {
  launch_scatter(output, inputs, root, group).wait();
}

Pending launch_all_to_all_single(const at::Tensor& output, const at::Tensor& input, const GroupPtr& group,
                                 const std::vector<int64_t>& output_splits, const std::vector<int64_t>& input_splits) {
  return checked_launch({.kind = CallKind::kAllToAllSingle,
                         .inputs = {input},
                         .outputs = {output},
                         .input_splits = input_splits,
                         .output_splits = output_splits},
                        group);
}

void all_to_all_single(const at::Tensor& output, const at::Tensor& input, const GroupPtr& group,
                       const std::vector<int64_t>& output_splits, const std::vector<int64_t>& input_splits) {
  launch_all_to_all_single(output, input, group, output_splits, input_splits).wait();
}

void all_to_all(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs, const GroupPtr& group) {
  const auto& state = detail::state_of(group);
  const auto problem = find_problem({.kind = CallKind::kAllToAll, .inputs = inputs, .outputs = outputs},
                                    state.description.rank, state.description.size);
  TORCH_CHECK(!problem, "[lockstep/comm] ", state.who(), ": all_to_all: ", *problem);
  // Through the single form: gloo before torch 2.12 has no other.
  std::vector<int64_t> input_splits;
  std::vector<int64_t> output_splits;
  std::vector<at::Tensor> flat;
  for (const auto& input : inputs) {
    input_splits.push_back(input.numel());
    flat.push_back(input.detach().reshape({-1}));
  }
  int64_t total = 0;
  for (const auto& output : outputs) {
    output_splits.push_back(output.numel());
    total += output.numel();
  }
  const at::Tensor received = at::empty({total}, outputs[0].options().requires_grad(false));
  all_to_all_single(received, at::cat(flat), group, output_splits, input_splits);
  const at::NoGradGuard no_grad;
  const auto pieces = received.split_with_sizes(output_splits);
  for (std::size_t i = 0; i < outputs.size(); ++i) outputs[i].detach().copy_(pieces[i].view(outputs[i].sizes()));
}

}  // namespace lockstep
