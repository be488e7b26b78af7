// The way from a Call to a backend: straight to ours, through c10d's functions and options to others.
#include "lockstep/comm/dispatch.h"

#include <ATen/core/Tensor.h>

#include <mutex>

#include "lockstep/comm/backend_registry.h"
#include "lockstep/comm/call_backend.h"

namespace lockstep {
namespace {

template <class Options>
Options options_for(const Call& call) {
  Options options;
  options.timeout = call.timeout;
  if constexpr (requires { options.reduceOp; }) {
    // Its constructor refuses PREMUL_SUM; the supplement by its old name, which all releases know.
    options.reduceOp.op_ = call.op;
    if (call.op == ReduceOp::PREMUL_SUM) {
      options.reduceOp.supplement_ = c10::make_intrusive<c10d::NCCLPreMulSumSupplement>(call.factor);
    }
  }
  if constexpr (requires { options.rootRank; }) options.rootRank = call.root;
  options.asyncOp = call.is_async;
  return options;
}

/// The single-tensor forms are about elements, not shapes, but gloo compares shapes: show it flat tensors.
void flatten(Call& call) {
  for (auto& input : call.inputs) input = input.detach().reshape({-1});
  for (auto& output : call.outputs) {
    TORCH_CHECK(output.is_contiguous(), "the output ", describe(output), " must be contiguous");
    output = output.detach().view({-1});
  }
}

}  // namespace

c10::intrusive_ptr<c10d::Work> detail::dispatch_through_c10d(c10d::Backend& backend, Call call,
                                                             const BackendTraits& traits) {
  // Every gloo group notes its calls in one recorder of the process, which libtorch guards only in part: the first call
  // of a group changes a map that others read. Calls only start here, so nobody waits long.
  static std::mutex one_start;
  std::unique_lock lock(one_start, std::defer_lock);
  if (!traits.starts_concurrently) lock.lock();
  if (call.kind == CallKind::kAllGatherSingle || call.kind == CallKind::kReduceScatterSingle) flatten(call);
  auto& inputs = call.inputs;
  auto& outputs = call.outputs;
  switch (call.kind) {
    case CallKind::kAllReduce:
      if (inputs.size() == 1) return backend.allreduce(inputs, options_for<c10d::AllreduceOptions>(call));
      return backend.allreduce_coalesced(inputs, options_for<c10d::AllreduceCoalescedOptions>(call));
    case CallKind::kReduce:
      return backend.reduce(inputs, options_for<c10d::ReduceOptions>(call));
    case CallKind::kBroadcast:
      return backend.broadcast(inputs, options_for<c10d::BroadcastOptions>(call));
    case CallKind::kAllGather: {
      if (inputs.size() == 1) {
        std::vector<std::vector<at::Tensor>> lists = {outputs};
        return backend.allgather(lists, inputs, options_for<c10d::AllgatherOptions>(call));
      }
      std::vector<std::vector<at::Tensor>> lists;
      for (auto from = outputs.begin(); from != outputs.end(); from += static_cast<std::ptrdiff_t>(inputs.size())) {
        lists.emplace_back(from, from + static_cast<std::ptrdiff_t>(inputs.size()));
      }
      return backend.allgather_coalesced(lists, inputs, options_for<c10d::AllgatherOptions>(call));
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
    case CallKind::kAllToAllSingle:
      return backend.alltoall_base(outputs[0], inputs[0], call.output_splits, call.input_splits,
                                   options_for<c10d::AllToAllOptions>(call));
    case CallKind::kBarrier:
      return backend.barrier(options_for<c10d::BarrierOptions>(call));
  }
  TORCH_INTERNAL_ASSERT(false, "unknown call kind ", static_cast<int>(call.kind));
}

c10::intrusive_ptr<c10d::Work> dispatch(c10d::Backend& backend, Call call) {
  if (auto* ours = dynamic_cast<CallBackend*>(&backend)) return ours->start(std::move(call));
  return detail::dispatch_through_c10d(backend, std::move(call), traits_of(backend));
}

}  // namespace lockstep
