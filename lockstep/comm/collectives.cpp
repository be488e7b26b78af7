#include "lockstep/comm/collectives.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include "lockstep/base/str.h"
#include "lockstep/comm/group_state.h"

namespace lockstep {
namespace {

void check(bool condition, const GroupPtr& group, CallKind kind, const std::string& problem) {
  TORCH_CHECK(condition, "[lockstep/comm] ", detail::state_of(group).who(), ": ", name_of(kind), ": ", problem);
}

/// What no backend may be asked: refused here, so that it reads the same whichever backend would have refused it.
Pending checked_launch(const Call& call, const GroupPtr& group) {
  const auto& state = detail::state_of(group).description;
  const auto size = static_cast<std::size_t>(state.size);
  at::Tensor first;
  for (const auto* tensors : {&call.inputs, &call.outputs}) {
    for (const auto& tensor : *tensors) {
      check(tensor.defined(), group, call.kind, "a tensor is undefined");
      check(tensor.layout() == at::kStrided, group, call.kind, str(describe(tensor), " is not dense"));
      if (!first.defined()) first = tensor;
      check(tensor.scalar_type() == first.scalar_type() && tensor.device() == first.device(), group, call.kind,
            str("tensors must share dtype and device: ", describe(first), " on ", first.device().str(), " and ",
                describe(tensor), " on ", tensor.device().str()));
    }
  }
  const auto count = [&](const std::vector<at::Tensor>& tensors, const char* what, std::size_t expected) {
    check(tensors.size() == expected, group, call.kind,
          str("expected ", expected, " ", what, ", one per rank, got ", tensors.size()));
  };
  check(call.root >= 0 && call.root < state.size, group, call.kind,
        str("root ", call.root, " is not in a group of ", state.size));
  const bool is_root = call.root == state.rank;
  switch (call.kind) {
    case CallKind::kAllGather:
      count(call.outputs, "outputs", size);
      break;
    case CallKind::kReduceScatter:
      count(call.inputs, "inputs", size);
      break;
    case CallKind::kGather:
      if (is_root) count(call.outputs, "outputs on the root", size);
      check(is_root || call.outputs.empty(), group, call.kind, "outputs are given, but this rank is not the root");
      break;
    case CallKind::kScatter:
      if (is_root) count(call.inputs, "inputs on the root", size);
      check(is_root || call.inputs.empty(), group, call.kind, "inputs are given, but this rank is not the root");
      break;
    case CallKind::kAllGatherSingle:
    case CallKind::kReduceScatterSingle:
      check(call.inputs.size() == call.outputs.size(), group, call.kind,
            str(call.inputs.size(), " inputs, but ", call.outputs.size(), " outputs"));
      for (std::size_t i = 0; i < call.inputs.size(); ++i) {
        const bool gathers = call.kind == CallKind::kAllGatherSingle;
        const auto& large = gathers ? call.outputs[i] : call.inputs[i];
        const auto& small = gathers ? call.inputs[i] : call.outputs[i];
        check(large.numel() == small.numel() * state.size, group, call.kind,
              str(describe(large), " must hold ", size, " times the elements of ", describe(small)));
      }
      break;
    case CallKind::kAllToAllSingle:
      for (const auto& [tensor, splits] :
           {std::pair{&call.inputs[0], &call.input_splits}, std::pair{&call.outputs[0], &call.output_splits}}) {
        const auto rows = tensor->dim() == 0 ? 1 : tensor->size(0);
        if (splits->empty()) {
          check(rows % state.size == 0, group, call.kind,
                str(describe(*tensor), " cannot be cut into ", size, " equal pieces; give the splits"));
        } else {
          int64_t total = 0;
          for (const auto split : *splits) total += split;
          check(splits->size() == size && total == rows, group, call.kind,
                str("splits ", join(*splits, ", "), " do not cut ", describe(*tensor), " into ", size, " pieces"));
        }
      }
      break;
    default:
      break;
  }
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
  const auto size = static_cast<std::size_t>(group->getSize());
  check(inputs.size() == size && outputs.size() == size, group, CallKind::kAllToAll,
        str("expected ", size, " inputs and outputs, one per rank, got ", inputs.size(), " and ", outputs.size()));
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
  for (std::size_t i = 0; i < size; ++i) outputs[i].detach().copy_(pieces[i].view(outputs[i].sizes()));
}

}  // namespace lockstep
