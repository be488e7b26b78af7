#include "lockstep/comm/hierarchical/byte_calls.h"

#include <ATen/ops/empty.h>

#include "lockstep/comm/hierarchical/packing.h"

namespace lockstep::detail {
namespace {

/// How many bytes go to, or come from, each rank.
std::vector<int64_t> byte_splits(const std::vector<at::Tensor>& tensors, const std::vector<int64_t>& splits,
                                 CallKind kind, int ranks) {
  std::vector<int64_t> bytes;
  if (kind == CallKind::kAllToAll) {
    for (const auto& tensor : tensors) bytes.push_back(static_cast<int64_t>(tensor.nbytes()));
    return bytes;
  }
  const auto& tensor = tensors.at(0);
  const auto total = static_cast<int64_t>(tensor.nbytes());
  const auto rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  for (const auto split : splits) bytes.push_back(rows == 0 ? 0 : split * (total / rows));
  if (splits.empty()) bytes.assign(static_cast<std::size_t>(ranks), total / ranks);
  return bytes;
}

}  // namespace

void run_as_bytes(c10d::Backend& backend, const Call& call, const Deadline& deadline) {
  const int ranks = backend.getSize();
  Call moved{.kind = call.kind, .root = call.root, .is_async = false};
  at::Tensor received;
  if (!call.inputs.empty()) moved.inputs = {bytes_of(pack(call.inputs))};
  if (!call.outputs.empty()) {
    received = room_for(call.outputs);
    moved.outputs = {bytes_of(received)};
  }
  switch (call.kind) {
    case CallKind::kGather:
      if (moved.inputs[0].numel() == 0) return;
      if (!moved.outputs.empty()) moved.outputs = rows_of(moved.outputs[0], ranks).unbind(0);
      break;
    case CallKind::kScatter:
      if (moved.outputs[0].numel() == 0) return;
      if (!moved.inputs.empty()) moved.inputs = rows_of(moved.inputs[0], ranks).unbind(0);
      break;
    case CallKind::kAllToAll:
    case CallKind::kAllToAllSingle:
      moved.kind = CallKind::kAllToAllSingle;
      moved.input_splits = byte_splits(call.inputs, call.input_splits, call.kind, ranks);
      moved.output_splits = byte_splits(call.outputs, call.output_splits, call.kind, ranks);
      if (!call.inputs.empty() && moved.inputs[0].is_alias_of(moved.outputs[0]))
        moved.inputs[0] = moved.inputs[0].clone();
      break;
    default:
      TORCH_INTERNAL_ASSERT(false, name_of(call.kind), " is not about bytes");
  }
  moved.timeout = deadline.left();
  dispatch(backend, std::move(moved))->wait();
  if (received.defined()) unpack(received, call.outputs);
}

}  // namespace lockstep::detail
