#include "lockstep/comm/call.h"

#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>

#include "lockstep/base/str.h"

namespace lockstep {

const char* name_of(CallKind kind) {
  switch (kind) {
    case CallKind::kAllReduce:
      return "all_reduce";
    case CallKind::kReduce:
      return "reduce";
    case CallKind::kBroadcast:
      return "broadcast";
    case CallKind::kAllGather:
      return "all_gather";
    case CallKind::kAllGatherSingle:
      return "all_gather_into_tensor";
    case CallKind::kReduceScatter:
      return "reduce_scatter";
    case CallKind::kReduceScatterSingle:
      return "reduce_scatter_tensor";
    case CallKind::kGather:
      return "gather";
    case CallKind::kScatter:
      return "scatter";
    case CallKind::kAllToAll:
      return "all_to_all";
    case CallKind::kAllToAllSingle:
      return "all_to_all_single";
    case CallKind::kBarrier:
      return "barrier";
  }
  TORCH_INTERNAL_ASSERT(false, "unknown call kind ", static_cast<int>(kind));
}

const char* name_of(ReduceOp op) {
  constexpr const char* kNames[] = {"sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum"};
  TORCH_INTERNAL_ASSERT(op < std::size(kNames), "unknown reduction ", static_cast<int>(op));
  return kNames[op];
}

std::string describe(const at::Tensor& tensor) {
  if (!tensor.defined()) return "undefined";
  return str(c10::toString(tensor.scalar_type()), "[", join(tensor.sizes(), ", "), "]");
}

std::size_t Call::bytes() const {
  std::size_t total = 0;
  for (const auto& tensor : inputs) total += tensor.nbytes();
  return total;
}

std::string Call::describe() const {
  std::string text = str(name_of(kind), "(");
  switch (kind) {
    case CallKind::kAllReduce:
    case CallKind::kReduce:
    case CallKind::kReduceScatter:
    case CallKind::kReduceScatterSingle:
      text += str(name_of(op), inputs.empty() ? "" : ", ");
      break;
    default:
      break;
  }
  // A rank that is not the root gives nothing to scatter; its output says as much.
  const auto& shown = inputs.empty() ? outputs : inputs;
  constexpr std::size_t kMostShown = 4;
  for (std::size_t i = 0; i < shown.size() && i < kMostShown; ++i) {
    text += str(i == 0 ? "" : ", ", lockstep::describe(shown[i]));
  }
  if (shown.size() > kMostShown) text += str(", … ", shown.size(), " tensors");
  if (kind == CallKind::kReduce || kind == CallKind::kBroadcast || kind == CallKind::kGather ||
      kind == CallKind::kScatter) {
    text += str(", root ", root);
  }
  return text + ")";
}

std::vector<at::Tensor> pieces_of(const at::Tensor& tensor, const std::vector<int64_t>& splits, int count) {
  if (splits.empty()) {
    TORCH_CHECK(tensor.numel() % count == 0, "a tensor of ", tensor.numel(), " elements cannot be cut into ", count,
                " equal pieces");
    if (tensor.dim() == 0 || tensor.size(0) % count != 0) return tensor.view({count, -1}).unbind(0);
    if (tensor.size(0) == 0) return std::vector<at::Tensor>(count, tensor);
    return tensor.split(tensor.size(0) / count);
  }
  return tensor.split_with_sizes(splits);
}

namespace {

template <class Options>
Options options_for(const Call& call) {
  Options options;
  options.timeout = call.timeout;
  if constexpr (requires { options.reduceOp; }) options.reduceOp = call.op;
  if constexpr (requires { options.rootRank; }) options.rootRank = call.root;
  return options;
}

/// The single-tensor forms are about elements, not shapes, but gloo compares shapes: show it flat tensors.
void flatten(std::vector<at::Tensor>& inputs, std::vector<at::Tensor>& outputs) {
  for (auto& input : inputs) input = input.detach().reshape({-1});
  for (auto& output : outputs) {
    TORCH_CHECK(output.is_contiguous(), "the output ", describe(output), " must be contiguous");
    output = output.detach().view({-1});
  }
}

}  // namespace

c10::intrusive_ptr<c10d::Work> dispatch(c10d::Backend& backend, const Call& call) {
  auto inputs = call.inputs;
  auto outputs = call.outputs;
  if (call.kind == CallKind::kAllGatherSingle || call.kind == CallKind::kReduceScatterSingle) flatten(inputs, outputs);
  switch (call.kind) {
    case CallKind::kAllReduce:
      if (inputs.size() == 1) return backend.allreduce(inputs, options_for<c10d::AllreduceOptions>(call));
      return backend.allreduce_coalesced(inputs, options_for<c10d::AllreduceCoalescedOptions>(call));
    case CallKind::kReduce:
      return backend.reduce(inputs, options_for<c10d::ReduceOptions>(call));
    case CallKind::kBroadcast:
      return backend.broadcast(inputs, options_for<c10d::BroadcastOptions>(call));
    case CallKind::kAllGather: {
      std::vector<std::vector<at::Tensor>> lists = {outputs};
      return backend.allgather(lists, inputs, options_for<c10d::AllgatherOptions>(call));
    }
    case CallKind::kAllGatherSingle:
      if (inputs.size() == 1) {
        return backend._allgather_base(outputs[0], inputs[0], options_for<c10d::AllgatherOptions>(call));
      }
      return backend.allgather_into_tensor_coalesced(outputs, inputs, options_for<c10d::AllgatherOptions>(call));
    case CallKind::kReduceScatter: {
      std::vector<std::vector<at::Tensor>> lists = {inputs};
      return backend.reduce_scatter(outputs, lists, options_for<c10d::ReduceScatterOptions>(call));
    }
    case CallKind::kReduceScatterSingle:
      if (inputs.size() == 1) {
        return backend._reduce_scatter_base(outputs[0], inputs[0], options_for<c10d::ReduceScatterOptions>(call));
      }
      return backend.reduce_scatter_tensor_coalesced(outputs, inputs, options_for<c10d::ReduceScatterOptions>(call));
    case CallKind::kGather: {
      std::vector<std::vector<at::Tensor>> lists;
      if (!outputs.empty()) lists.push_back(outputs);
      return backend.gather(lists, inputs, options_for<c10d::GatherOptions>(call));
    }
    case CallKind::kScatter: {
      std::vector<std::vector<at::Tensor>> lists;
      if (!inputs.empty()) lists.push_back(inputs);
      return backend.scatter(outputs, lists, options_for<c10d::ScatterOptions>(call));
    }
    case CallKind::kAllToAll:
      return backend.alltoall(outputs, inputs, options_for<c10d::AllToAllOptions>(call));
    case CallKind::kAllToAllSingle: {
      auto output_splits = call.output_splits;
      auto input_splits = call.input_splits;
      return backend.alltoall_base(outputs[0], inputs[0], output_splits, input_splits,
                                   options_for<c10d::AllToAllOptions>(call));
    }
    case CallKind::kBarrier:
      return backend.barrier(options_for<c10d::BarrierOptions>(call));
  }
  TORCH_INTERNAL_ASSERT(false, "unknown call kind ", static_cast<int>(call.kind));
}

}  // namespace lockstep
