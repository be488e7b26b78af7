#include "lockstep/comm/collectives.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include "lockstep/comm/group_state.h"

namespace lockstep {
namespace {

/// Coalescing nothing is legal and does nothing, on every rank alike.
Pending coalesced(Call call, const GroupPtr& group) {
  if (call.inputs.empty() && call.outputs.empty()) return {};
  return launch(std::move(call), group);
}

/// Blocks: the backend may run it right here.
void run(Call call, const GroupPtr& group) {
  call.is_async = false;
  launch(std::move(call), group).wait();
}

void run_coalesced(Call call, const GroupPtr& group) {
  call.is_async = false;
  coalesced(std::move(call), group).wait();
}

Call all_reduce_call(const at::Tensor& tensor, ReduceOp op) {
  return {.kind = CallKind::kAllReduce, .inputs = {tensor}, .op = op};
}

Call all_reduce_coalesced_call(const std::vector<at::Tensor>& tensors, ReduceOp op) {
  return {.kind = CallKind::kAllReduce, .inputs = tensors, .op = op};
}

Call reduce_call(const at::Tensor& tensor, int root, ReduceOp op) {
  return {.kind = CallKind::kReduce, .inputs = {tensor}, .op = op, .root = root};
}

Call broadcast_call(const at::Tensor& tensor, int root) {
  return {.kind = CallKind::kBroadcast, .inputs = {tensor}, .root = root};
}

Call all_gather_call(const std::vector<at::Tensor>& outputs, const at::Tensor& input) {
  return {.kind = CallKind::kAllGather, .inputs = {input}, .outputs = outputs};
}

Call all_gather_into_tensor_call(const at::Tensor& output, const at::Tensor& input) {
  return {.kind = CallKind::kAllGatherSingle, .inputs = {input}, .outputs = {output}};
}

Call all_gather_into_tensor_coalesced_call(const std::vector<at::Tensor>& outputs,
                                           const std::vector<at::Tensor>& inputs) {
  return {.kind = CallKind::kAllGatherSingle, .inputs = inputs, .outputs = outputs};
}

Call reduce_scatter_call(const at::Tensor& output, const std::vector<at::Tensor>& inputs, ReduceOp op) {
  return {.kind = CallKind::kReduceScatter, .inputs = inputs, .outputs = {output}, .op = op};
}

Call reduce_scatter_tensor_call(const at::Tensor& output, const at::Tensor& input, ReduceOp op) {
  return {.kind = CallKind::kReduceScatterSingle, .inputs = {input}, .outputs = {output}, .op = op};
}

Call reduce_scatter_tensor_coalesced_call(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                                          ReduceOp op) {
  return {.kind = CallKind::kReduceScatterSingle, .inputs = inputs, .outputs = outputs, .op = op};
}

Call gather_call(const at::Tensor& input, const std::vector<at::Tensor>& outputs, int root) {
  return {.kind = CallKind::kGather, .inputs = {input}, .outputs = outputs, .root = root};
}

Call scatter_call(const at::Tensor& output, const std::vector<at::Tensor>& inputs, int root) {
  return {.kind = CallKind::kScatter, .inputs = inputs, .outputs = {output}, .root = root};
}

Call all_to_all_single_call(const at::Tensor& output, const at::Tensor& input,
                            const std::vector<int64_t>& output_splits, const std::vector<int64_t>& input_splits) {
  return {.kind = CallKind::kAllToAllSingle,
          .inputs = {input},
          .outputs = {output},
          .input_splits = input_splits,
          .output_splits = output_splits};
}

}  // namespace

Pending launch_all_reduce(const at::Tensor& tensor, const GroupPtr& group, ReduceOp op) {
  return launch(all_reduce_call(tensor, op), group);
}

void all_reduce(const at::Tensor& tensor, const GroupPtr& group, ReduceOp op) {
  run(all_reduce_call(tensor, op), group);
}

Pending launch_all_reduce_coalesced(const std::vector<at::Tensor>& tensors, const GroupPtr& group, ReduceOp op) {
  return coalesced(all_reduce_coalesced_call(tensors, op), group);
}

void all_reduce_coalesced(const std::vector<at::Tensor>& tensors, const GroupPtr& group, ReduceOp op) {
  run_coalesced(all_reduce_coalesced_call(tensors, op), group);
}

Pending launch_reduce(const at::Tensor& tensor, int root, const GroupPtr& group, ReduceOp op) {
  return launch(reduce_call(tensor, root, op), group);
}

void reduce(const at::Tensor& tensor, int root, const GroupPtr& group, ReduceOp op) {
  run(reduce_call(tensor, root, op), group);
}

Pending launch_broadcast(const at::Tensor& tensor, int root, const GroupPtr& group) {
  return launch(broadcast_call(tensor, root), group);
}

void broadcast(const at::Tensor& tensor, int root, const GroupPtr& group) {
  run(broadcast_call(tensor, root), group);
}

Pending launch_all_gather(const std::vector<at::Tensor>& outputs, const at::Tensor& input, const GroupPtr& group) {
  return launch(all_gather_call(outputs, input), group);
}

void all_gather(const std::vector<at::Tensor>& outputs, const at::Tensor& input, const GroupPtr& group) {
  run(all_gather_call(outputs, input), group);
}

Pending launch_all_gather_into_tensor(const at::Tensor& output, const at::Tensor& input, const GroupPtr& group) {
  return launch(all_gather_into_tensor_call(output, input), group);
}

void all_gather_into_tensor(const at::Tensor& output, const at::Tensor& input, const GroupPtr& group) {
  run(all_gather_into_tensor_call(output, input), group);
}

Pending launch_all_gather_into_tensor_coalesced(const std::vector<at::Tensor>& outputs,
                                                const std::vector<at::Tensor>& inputs, const GroupPtr& group) {
  return coalesced(all_gather_into_tensor_coalesced_call(outputs, inputs), group);
}

void all_gather_into_tensor_coalesced(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                                      const GroupPtr& group) {
  run_coalesced(all_gather_into_tensor_coalesced_call(outputs, inputs), group);
}

Pending launch_reduce_scatter(const at::Tensor& output, const std::vector<at::Tensor>& inputs, const GroupPtr& group,
                              ReduceOp op) {
  return launch(reduce_scatter_call(output, inputs, op), group);
}

void reduce_scatter(const at::Tensor& output, const std::vector<at::Tensor>& inputs, const GroupPtr& group,
                    ReduceOp op) {
  run(reduce_scatter_call(output, inputs, op), group);
}

Pending launch_reduce_scatter_tensor(const at::Tensor& output, const at::Tensor& input, const GroupPtr& group,
                                     ReduceOp op) {
  return launch(reduce_scatter_tensor_call(output, input, op), group);
}

void reduce_scatter_tensor(const at::Tensor& output, const at::Tensor& input, const GroupPtr& group, ReduceOp op) {
  run(reduce_scatter_tensor_call(output, input, op), group);
}

Pending launch_reduce_scatter_tensor_coalesced(const std::vector<at::Tensor>& outputs,
                                               const std::vector<at::Tensor>& inputs, const GroupPtr& group,
                                               ReduceOp op) {
  return coalesced(reduce_scatter_tensor_coalesced_call(outputs, inputs, op), group);
}

void reduce_scatter_tensor_coalesced(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                                     const GroupPtr& group, ReduceOp op) {
  run_coalesced(reduce_scatter_tensor_coalesced_call(outputs, inputs, op), group);
}

Pending launch_gather(const at::Tensor& input, const std::vector<at::Tensor>& outputs, int root,
                      const GroupPtr& group) {
  return launch(gather_call(input, outputs, root), group);
}

void gather(const at::Tensor& input, const std::vector<at::Tensor>& outputs, int root, const GroupPtr& group) {
  run(gather_call(input, outputs, root), group);
}

Pending launch_scatter(const at::Tensor& output, const std::vector<at::Tensor>& inputs, int root,
                       const GroupPtr& group) {
  return launch(scatter_call(output, inputs, root), group);
}

void scatter(const at::Tensor& output, const std::vector<at::Tensor>& inputs, int root, const GroupPtr& group) {
  run(scatter_call(output, inputs, root), group);
}

Pending launch_all_to_all_single(const at::Tensor& output, const at::Tensor& input, const GroupPtr& group,
                                 const std::vector<int64_t>& output_splits, const std::vector<int64_t>& input_splits) {
  return launch(all_to_all_single_call(output, input, output_splits, input_splits), group);
}

void all_to_all_single(const at::Tensor& output, const at::Tensor& input, const GroupPtr& group,
                       const std::vector<int64_t>& output_splits, const std::vector<int64_t>& input_splits) {
  run(all_to_all_single_call(output, input, output_splits, input_splits), group);
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
