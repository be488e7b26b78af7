// What each collective does, written once for all ranks: calls[r] holds rank r's tensors and this function moves the
// data.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/bitwise_and.h>
#include <ATen/ops/bitwise_or.h>
#include <ATen/ops/bitwise_xor.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <c10/core/GradMode.h>

#include <algorithm>

#include "lockstep/base/str.h"
#include "lockstep/comm/threads/thread_hub.h"

namespace lockstep {
namespace {

using Pieces = std::vector<at::Tensor>;

/// Writes without looking at shapes: only the number of elements must agree, as in c10d.
void write(const at::Tensor& to, const at::Tensor& from) {
  TORCH_CHECK(to.numel() == from.numel(), "the receiver expects ", describe(to), ", the sender gives ", describe(from));
  if (to.is_same(from)) return;
  to.copy_(from.reshape(to.sizes()));
}

/// Sums in rank order. Half types accumulate in float, so the result does not depend on how many ranks there are.
at::Tensor reduce(const Pieces& parts, ReduceOp op) {
  const auto dtype = parts[0].scalar_type();
  const bool is_half = dtype == at::kHalf || dtype == at::kBFloat16;
  const auto wide = is_half ? at::kFloat : dtype;
  at::Tensor total = parts[0].to(wide, /*non_blocking=*/false, /*copy=*/true).contiguous();
  for (std::size_t rank = 1; rank < parts.size(); ++rank) {
    const at::Tensor part = parts[rank].reshape(total.sizes()).to(total.device(), wide);
    switch (op) {
      case ReduceOp::SUM:
      case ReduceOp::AVG:
        total.add_(part);
        break;
      case ReduceOp::PRODUCT:
        total.mul_(part);
        break;
      case ReduceOp::MIN:
        total = at::minimum(total, part);
        break;
      case ReduceOp::MAX:
        total = at::maximum(total, part);
        break;
      case ReduceOp::BAND:
        total.bitwise_and_(part);
        break;
      case ReduceOp::BOR:
        total.bitwise_or_(part);
        break;
      case ReduceOp::BXOR:
        total.bitwise_xor_(part);
        break;
      default:
        TORCH_CHECK(false, "reduction ", name_of(op), " is not supported among threads");
    }
  }
  if (op == ReduceOp::AVG) divide_by_ranks({total}, static_cast<int64_t>(parts.size()));
  return is_half ? total.to(dtype) : total;
}

/// The i-th input of every rank.
Pieces column(const std::vector<const Call*>& calls, std::size_t i) {
  Pieces parts;
  for (const Call* call : calls) parts.push_back(call->inputs[i]);
  return parts;
}

void all_reduce(const std::vector<const Call*>& calls) {
  for (std::size_t i = 0; i < calls[0]->inputs.size(); ++i) {
    const at::Tensor total = reduce(column(calls, i), calls[0]->op);
    for (const Call* call : calls) write(call->inputs[i], total);
  }
}

void all_gather(const std::vector<const Call*>& calls, std::size_t i, const std::vector<Pieces>& outputs) {
  for (std::size_t to = 0; to < outputs.size(); ++to) {
    const Pieces& pieces = outputs[to];
    for (std::size_t from = 0; from < calls.size(); ++from) {
      const at::Tensor& given = calls[from]->inputs[i];
      TORCH_CHECK(pieces[from].numel() == given.numel(), "rank ", from, " gives ", describe(given), ", but rank ", to,
                  " expects ", describe(pieces[from]), " from it");
      write(pieces[from], given);
    }
  }
}

void reduce_scatter(const std::vector<const Call*>& calls, std::size_t i, const std::vector<Pieces>& inputs) {
  // All shares are computed before any is written: an output may be a piece of its own input.
  Pieces shares;
  for (std::size_t to = 0; to < calls.size(); ++to) {
    Pieces parts;
    for (const Pieces& pieces : inputs) parts.push_back(pieces[to]);
    shares.push_back(reduce(parts, calls[0]->op));
  }
  for (std::size_t to = 0; to < calls.size(); ++to) write(calls[to]->outputs[i], shares[to]);
}

/// The rank's inputs, copied if its outputs are written over them.
Pieces safe_inputs(const Call& call) {
  Pieces inputs = call.inputs;
  for (auto& input : inputs) {
    if (std::any_of(call.outputs.begin(), call.outputs.end(),
                    [&](const auto& out) { return out.is_alias_of(input); })) {
      input = input.clone();
    }
  }
  return inputs;
}

void all_to_all(const std::vector<Pieces>& inputs, const std::vector<Pieces>& outputs) {
  for (std::size_t to = 0; to < outputs.size(); ++to) {
    for (std::size_t from = 0; from < inputs.size(); ++from) {
      TORCH_CHECK(outputs[to][from].numel() == inputs[from][to].numel(), "rank ", from, " sends ",
                  describe(inputs[from][to]), " to rank ", to, ", which expects ", describe(outputs[to][from]));
      write(outputs[to][from], inputs[from][to]);
    }
  }
}

}  // namespace

void perform(const std::vector<const Call*>& calls) {
  // Outputs may be leaves that require grad or be saved for backward: neither autograd nor version counters may notice.
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const int size = static_cast<int>(calls.size());
  const Call& first = *calls[0];
  const auto each = [&](auto&& pieces) {
    std::vector<Pieces> result;
    for (const Call* call : calls) result.push_back(pieces(*call));
    return result;
  };
  switch (first.kind) {
    case CallKind::kAllReduce:
      return all_reduce(calls);
    case CallKind::kReduce:
      return write(calls[first.root]->inputs[0], reduce(column(calls, 0), first.op));
    case CallKind::kBroadcast:
      for (const Call* call : calls) write(call->inputs[0], calls[first.root]->inputs[0]);
      return;
    case CallKind::kAllGather: {
      const auto count = first.inputs.size();
      for (std::size_t i = 0; i < count; ++i) {
        all_gather(calls, i, each([&](const Call& call) {
                     Pieces pieces;
                     for (int rank = 0; rank < size; ++rank) pieces.push_back(call.outputs[rank * count + i]);
                     return pieces;
                   }));
      }
      return;
    }
    case CallKind::kAllGatherSingle:
      for (std::size_t i = 0; i < first.inputs.size(); ++i) {
        all_gather(calls, i, each([&](const Call& call) { return pieces_of(call.outputs[i], {}, size); }));
      }
      return;
    case CallKind::kReduceScatter:
      return reduce_scatter(calls, 0, each([](const Call& call) { return call.inputs; }));
    case CallKind::kReduceScatterSingle:
      for (std::size_t i = 0; i < first.inputs.size(); ++i) {
        reduce_scatter(calls, i, each([&](const Call& call) { return pieces_of(call.inputs[i], {}, size); }));
      }
      return;
    case CallKind::kGather:
      for (int from = 0; from < size; ++from) write(calls[first.root]->outputs[from], calls[from]->inputs[0]);
      return;
    case CallKind::kScatter: {
      const auto inputs = safe_inputs(*calls[first.root]);
      for (int to = 0; to < size; ++to) write(calls[to]->outputs[0], inputs[to]);
      return;
    }
    case CallKind::kAllToAll:
      return all_to_all(each([](const Call& call) { return safe_inputs(call); }),
                        each([](const Call& call) { return call.outputs; }));
    case CallKind::kAllToAllSingle:
      return all_to_all(
          each([&](const Call& call) { return pieces_of(safe_inputs(call)[0], call.input_splits, size); }),
          each([&](const Call& call) { return pieces_of(call.outputs[0], call.output_splits, size); }));
    case CallKind::kBarrier:
      return;
  }
}

namespace {

/// Kinds whose inputs must be alike on all ranks. The others are checked piece by piece when data moves.
bool has_equal_inputs(CallKind kind) {
  return is_reduction(kind) || kind == CallKind::kBroadcast || kind == CallKind::kAllGatherSingle ||
         kind == CallKind::kGather;
}

/// The dtype that travels.
std::optional<at::ScalarType> dtype_of(const Call& call) {
  const auto& tensors = call.subjects();
  if (tensors.empty()) return std::nullopt;
  return tensors[0].scalar_type();
}

}  // namespace

std::optional<std::string> find_mismatch(const Call& one, const Call& other) {
  if (one.kind != other.kind) return "operations";
  if (is_reduction(one.kind) && one.op != other.op) return "reductions";
  if (has_root(one.kind) && one.root != other.root) return "roots";
  if (dtype_of(one) != dtype_of(other)) return "dtypes";
  const bool is_compared = one.label.is_compared || other.label.is_compared;
  if (is_compared && one.label.str() != other.label.str()) return "purposes";
  if ((has_equal_inputs(one.kind) || one.kind == CallKind::kAllGather) && one.inputs.size() != other.inputs.size()) {
    return "numbers of tensors";
  }
  if (!has_equal_inputs(one.kind)) return std::nullopt;
  for (std::size_t i = 0; i < one.inputs.size(); ++i) {
    if (one.inputs[i].numel() != other.inputs[i].numel()) return "sizes";
    if (one.inputs[i].scalar_type() != other.inputs[i].scalar_type()) return "dtypes";
  }
  return std::nullopt;
}

}  // namespace lockstep
