#include "lockstep/comm/call.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>

#include <algorithm>

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

bool is_reduction(CallKind kind) {
  return kind == CallKind::kAllReduce || kind == CallKind::kReduce || kind == CallKind::kReduceScatter ||
         kind == CallKind::kReduceScatterSingle;
}

bool has_root(CallKind kind) {
  return kind == CallKind::kReduce || kind == CallKind::kBroadcast || kind == CallKind::kGather ||
         kind == CallKind::kScatter;
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

namespace {

std::string operation_text(const Call& call) {
  std::string text = str(name_of(call.kind), "(");
  const auto& shown = call.subjects();
  if (is_reduction(call.kind)) text += str(name_of(call.op), shown.empty() ? "" : ", ");
  constexpr std::size_t kMostShown = 4;
  for (std::size_t i = 0; i < shown.size() && i < kMostShown; ++i) {
    text += str(i == 0 ? "" : ", ", describe(shown[i]));
  }
  if (shown.size() > kMostShown) text += str(", … ", shown.size(), " tensors");
  if (has_root(call.kind)) text += str(", root ", call.root);
  return text + ")";
}

std::string suffix(const CallLabel& label) {
  return label.empty() ? "" : " of " + label.str();
}

}  // namespace

std::string Call::describe() const {
  return operation_text(*this) + suffix(label);
}

std::string Call::describe(uint64_t sequence) const {
  return str(operation_text(*this), " #", sequence, suffix(label));
}

namespace {

std::optional<std::string> find_split_problem(const at::Tensor& tensor, const std::vector<int64_t>& splits, int size) {
  const auto rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  if (splits.empty()) {
    if (rows % size == 0) return std::nullopt;
    return str(describe(tensor), " cannot be cut into ", size, " equal pieces; give the splits");
  }
  int64_t total = 0;
  int64_t least = 0;
  for (const auto split : splits) {
    total += split;
    least = std::min(least, split);
  }
  if (splits.size() == static_cast<std::size_t>(size) && total == rows && least >= 0) return std::nullopt;
  return str("splits ", join(splits, ", "), " do not cut ", describe(tensor), " into ", size, " pieces");
}

std::optional<std::string> find_tensor_problem(const Call& call) {
  const at::Tensor* first = nullptr;
  for (const auto* tensors : {&call.inputs, &call.outputs}) {
    for (const auto& tensor : *tensors) {
      if (!tensor.defined()) return "a tensor is undefined";
      if (tensor.layout() != at::kStrided) return str(describe(tensor), " is not dense");
      if (first == nullptr) first = &tensor;
      if (tensor.scalar_type() == first->scalar_type() && tensor.device() == first->device()) continue;
      return str("tensors must share dtype and device: ", describe(*first), " on ", first->device().str(), " and ",
                 describe(tensor), " on ", tensor.device().str());
    }
  }
  return std::nullopt;
}

/// Kinds that give or get one tensor, not a list.
std::optional<std::string> find_count_problem(const Call& call) {
  const auto not_one = [](const std::vector<at::Tensor>& tensors, const char* what) -> std::optional<std::string> {
    if (tensors.size() == 1) return std::nullopt;
    return str("takes one ", what, ", got ", tensors.size());
  };
  switch (call.kind) {
    case CallKind::kReduce:
    case CallKind::kBroadcast:
      return not_one(call.inputs, "tensor");
    case CallKind::kGather:
      return not_one(call.inputs, "input");
    case CallKind::kReduceScatter:
      if (call.outputs.empty()) return "there is no output";
      return not_one(call.outputs, "output");
    case CallKind::kScatter:
      return not_one(call.outputs, "output");
    case CallKind::kAllToAllSingle:
      if (auto problem = not_one(call.inputs, "input")) return problem;
      return not_one(call.outputs, "output");
    default:
      return std::nullopt;
  }
}

}  // namespace

std::optional<std::string> find_problem(const Call& call, int rank, int size) {
  if (auto problem = find_tensor_problem(call)) return problem;
  if (auto problem = find_count_problem(call)) return problem;
  if (call.root < 0 || call.root >= size) return str("root ", call.root, " is not in a group of ", size);
  const bool is_root = call.root == rank;
  const auto wrong_count = [&](const std::vector<at::Tensor>& tensors, const char* what) -> std::optional<std::string> {
    if (tensors.size() == static_cast<std::size_t>(size)) return std::nullopt;
    return str("expected ", size, " ", what, ", one per rank, got ", tensors.size());
  };
  switch (call.kind) {
    case CallKind::kAllGather:
      if (call.inputs.size() == 1) return wrong_count(call.outputs, "outputs");
      if (call.outputs.size() != call.inputs.size() * static_cast<std::size_t>(size)) {
        return str(call.inputs.size(), " inputs of ", size, " ranks, but ", call.outputs.size(), " outputs");
      }
      for (std::size_t i = 0; i < call.outputs.size(); ++i) {
        const auto& input = call.inputs[i % call.inputs.size()];
        if (call.outputs[i].numel() == input.numel()) continue;
        return str("output ", describe(call.outputs[i]), " must have the elements of input ", describe(input));
      }
      return std::nullopt;
    case CallKind::kReduceScatter:
      if (auto problem = wrong_count(call.inputs, "inputs")) return problem;
      if (call.outputs[0].numel() == call.inputs[rank].numel()) return std::nullopt;
      return str("the output ", describe(call.outputs[0]), " must have the elements of inputs[", rank, "], ",
                 describe(call.inputs[rank]));
    case CallKind::kGather:
      if (is_root) return wrong_count(call.outputs, "outputs on the root");
      if (!call.outputs.empty()) return "outputs are given, but this rank is not the root";
      return std::nullopt;
    case CallKind::kScatter:
      if (is_root) return wrong_count(call.inputs, "inputs on the root");
      if (!call.inputs.empty()) return "inputs are given, but this rank is not the root";
      return std::nullopt;
    case CallKind::kAllToAll:
      if (auto problem = wrong_count(call.inputs, "inputs")) return problem;
      return wrong_count(call.outputs, "outputs");
    case CallKind::kAllGatherSingle:
    case CallKind::kReduceScatterSingle:
      if (call.inputs.size() != call.outputs.size()) {
        return str(call.inputs.size(), " inputs, but ", call.outputs.size(), " outputs");
      }
      for (std::size_t i = 0; i < call.inputs.size(); ++i) {
        const bool gathers = call.kind == CallKind::kAllGatherSingle;
        const auto& large = gathers ? call.outputs[i] : call.inputs[i];
        const auto& small = gathers ? call.inputs[i] : call.outputs[i];
        if (large.numel() == small.numel() * size) continue;
        return str(describe(large), " must hold ", size, " times the elements of ", describe(small));
      }
      return std::nullopt;
    case CallKind::kAllToAllSingle:
      if (auto problem = find_split_problem(call.inputs[0], call.input_splits, size)) return problem;
      return find_split_problem(call.outputs[0], call.output_splits, size);
    default:
      return std::nullopt;
  }
}

void divide_by_ranks(const std::vector<at::Tensor>& tensors, int64_t ranks) {
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (const auto& tensor : tensors) {
    if (c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/true)) {
      tensor.div_(ranks, "trunc");
    } else {
      tensor.div_(ranks);
    }
  }
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

}  // namespace lockstep
