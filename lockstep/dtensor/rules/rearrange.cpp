// Operators that move elements into a new tensor: they join, turn, repeat and pad, and give gradients of views.
#include <algorithm>
#include <utility>

#include "lockstep/dtensor/rule.h"
#include "lockstep/dtensor/rules/shape.h"
#include "lockstep/dtensor/shape_map.h"

namespace lockstep::detail {
namespace {

using DimTargets = std::vector<std::optional<int64_t>>;

Plan rearranged(Sizes sizes, ShapeMap map) {
  Plan plan;
  plan.result_sizes = {std::move(sizes)};
  plan.operand_placements = std::move(map.inputs);
  plan.result_placements = std::move(map.outputs);
  return plan;
}

const Placements& given_placements(const RuleCall& call) {
  return call.operands().front().layout->placements();
}

/// Of the operands at `positions`. An ordinary tensor is a replica, which can be cut for nothing: like the first other.
std::vector<Placements> joined_placements(const RuleCall& call, const std::vector<std::size_t>& positions) {
  const auto is_distributed = [&](std::size_t i) { return dtensor_impl(call.operands()[i].tensor) != nullptr; };
  const auto first = std::find_if(positions.begin(), positions.end(), is_distributed);
  std::vector<Placements> placements;
  for (const auto i : positions) {
    const auto source = is_distributed(i) || first == positions.end() ? i : *first;
    placements.push_back(call.operands()[source].layout->placements());
  }
  return placements;
}

/// libtorch leaves out tensors of sizes [0], whatever dims the others have.
Plan cat(const RuleCall& call) {
  const auto& operands = call.operands();
  std::vector<std::size_t> joined;
  for (std::size_t i = 0; i < operands.size(); ++i) {
    if (operands[i].sizes() != Sizes{0}) joined.push_back(i);
  }
  if (joined.empty()) joined.push_back(0);
  std::vector<Sizes> sizes;
  for (const auto i : joined) sizes.push_back(operands[i].sizes());
  auto result = sizes.front();
  const auto dim = RuleCall::dim_from_front(call.argument(1).toInt(), static_cast<int64_t>(result.size()));
  auto& length = result.at(static_cast<std::size_t>(dim));
  length = 0;
  for (const auto& each : sizes) {
    TORCH_CHECK(each.size() == result.size(), call.describe(), ": tensors must have the same number of dims.");
    length += each[static_cast<std::size_t>(dim)];
  }
  auto map = map_cat(sizes, dim, call.mesh().shape(), joined_placements(call, joined));
  std::vector<Placements> inputs;
  for (const auto& operand : operands) inputs.push_back(operand.layout->placements());
  for (std::size_t i = 0; i < joined.size(); ++i) inputs[joined[i]] = std::move(map.inputs[i]);
  map.inputs = std::move(inputs);
  return rearranged(std::move(result), std::move(map));
}

Plan stack(const RuleCall& call) {
  const auto& first = call.operands().front();
  std::vector<std::size_t> all;
  for (std::size_t i = 0; i < call.operands().size(); ++i) {
    TORCH_CHECK(call.operands()[i].sizes() == first.sizes(), call.describe(), ": tensors must have the same sizes.");
    all.push_back(i);
  }
  const auto dim = RuleCall::dim_from_front(call.argument(1).toInt(), first.dim() + 1);
  auto sizes = first.sizes();
  TORCH_CHECK(dim >= 0 && dim <= first.dim(), call.describe(), ": dim ", dim, " is out of range.");
  sizes.insert(sizes.begin() + dim, static_cast<int64_t>(all.size()));
  return rearranged(std::move(sizes), map_stack(first.dim(), dim, joined_placements(call, all)));
}

/// flip and roll: the dims they turn are whole.
Plan turned(const RuleCall& call, std::vector<int64_t> dims) {
  const auto& operand = call.operands().front();
  for (auto& dim : dims) dim = RuleCall::dim_from_front(dim, operand.dim());
  return rearranged(operand.sizes(), map_whole(operand.dim(), dims, given_placements(call)));
}

Plan flip(const RuleCall& call) {
  return turned(call, call.argument(1).toIntVector());
}

/// Without dims it rolls the flattened tensor.
Plan roll(const RuleCall& call) {
  auto dims = call.argument(2).toIntVector();
  for (int64_t dim = 0; call.argument(2).toIntVector().empty() && dim < call.operands().front().dim(); ++dim) {
    dims.push_back(dim);
  }
  return turned(call, std::move(dims));
}

Plan repeat(const RuleCall& call) {
  const auto& operand = call.operands().front();
  const auto repeats = call.argument(1).toIntVector();
  TORCH_CHECK(static_cast<int64_t>(repeats.size()) >= operand.dim(), call.describe(),
              ": there must be a number of repetitions for every dim.");
  auto sizes = operand.sizes();
  sizes.insert(sizes.begin(), repeats.size() - sizes.size(), 1);
  for (std::size_t i = 0; i < sizes.size(); ++i) sizes[i] *= repeats[i];
  return rearranged(std::move(sizes),
                    map_repeat(operand.sizes(), repeats, call.mesh().shape(), given_placements(call)));
}

/// Gradients of views: zeros of the sizes in the second argument, with the given gradient in its place.
Plan unviewed(const RuleCall& call, ShapeMap map) {
  auto plan = rearranged(call.argument(1).toIntVector(), std::move(map));
  plan.sizes_argument = 1;
  return plan;
}

int64_t dim_of_view(const RuleCall& call, std::size_t index) {
  return RuleCall::dim_from_front(call.argument(index).toInt(),
                                  static_cast<int64_t>(call.argument(1).toIntVector().size()));
}

Plan select_backward(const RuleCall& call) {
  return unviewed(call, map_unsqueeze(call.operands().front().dim(), dim_of_view(call, 2), given_placements(call)));
}

Plan slice_backward(const RuleCall& call) {
  const auto sizes = call.argument(1).toIntVector();
  const auto dim = dim_of_view(call, 2);
  const auto dims = static_cast<int64_t>(sizes.size());
  if (call.argument(5).toInt() != 1) return unviewed(call, map_whole(dims, {dim}, given_placements(call)));
  const auto size = sizes.at(static_cast<std::size_t>(dim));
  const auto range = slice_range(call.argument(3), call.argument(4), size);
  auto plan = unviewed(call, map_slice_backward(sizes, dim, range, call.mesh().shape(), given_placements(call)));
  plan.run = [=](LocalCall& local) {
    const auto held = local_range(range, size, local_sizes_in(*local.results.front())[static_cast<std::size_t>(dim)]);
    local.arguments[3] = held.begin;
    local.arguments[4] = held.end;
    return local.run();
  };
  return plan;
}

/// The last dim of the gradient becomes two dims.
Plan diagonal_backward(const RuleCall& call) {
  const auto first = dim_of_view(call, 3);
  const auto second = dim_of_view(call, 4);
  DimTargets targets;
  for (int64_t dim = 0; dim <= call.operands().front().dim(); ++dim) {
    if (dim != first && dim != second) targets.emplace_back(dim);
  }
  targets.emplace_back();
  return unviewed(call, map_dims(targets, given_placements(call)));
}

/// The last dim of the gradient holds windows of `dim`.
Plan unfold_backward(const RuleCall& call) {
  const auto dims = call.operands().front().dim();
  return unviewed(call, map_whole(dims, {dim_of_view(call, 2), dims - 1}, given_placements(call)));
}

/// tril and triu. A rank that holds neighbouring rows or columns moves the diagonal by where they begin.
Plan triangle(const RuleCall& call) {
  const auto& operand = call.operands().front();
  TORCH_CHECK(operand.dim() >= 2, call.describe(), ": a matrix has at least two dims.");
  auto placements = given_placements(call);
  for (auto& each : placements) {
    const auto* strided = std::get_if<StridedShard>(&each);
    if (strided != nullptr && strided->dim >= operand.dim() - 2) each = Replicate();
  }
  auto plan = rearranged(operand.sizes(), {.inputs = {placements}, .outputs = {placements}});
  plan.run = [](LocalCall& local) {
    const auto offsets = local.results.front()->offsets();
    const auto dims = offsets.size();
    local.arguments[1] = local.arguments[1].toInt() + offsets[dims - 2] - offsets[dims - 1];
    return local.run();
  };
  return plan;
}

/// Dims that are padded are whole. A number other than 0 is not what a sum of it is.
Plan pad(const RuleCall& call) {
  const auto& operand = call.operands().front();
  const auto widths = call.argument(1).toIntVector();
  auto sizes = operand.sizes();
  TORCH_CHECK(widths.size() % 2 == 0 && widths.size() / 2 <= sizes.size(), call.describe(),
              ": pads are two numbers for each of the last dims.");
  std::vector<int64_t> padded;
  for (std::size_t i = 0; i < widths.size() / 2; ++i) {
    const auto dim = sizes.size() - 1 - i;
    if (widths[2 * i] == 0 && widths[2 * i + 1] == 0) continue;
    sizes[dim] += widths[2 * i] + widths[2 * i + 1];
    padded.push_back(static_cast<int64_t>(dim));
  }
  auto placements = given_placements(call);
  for (auto& each : placements) {
    if (is_partial(each) && !call.argument(2).toScalar().equal(0)) each = Replicate();
  }
  return rearranged(std::move(sizes), map_whole(operand.dim(), padded, placements));
}

}  // namespace

void add_rearrange_rules(RuleTable& table) {
  table["aten::cat"] = {.plan = &cat};
  table["aten::stack"] = {.plan = &stack};
  table["aten::flip"] = {.plan = &flip};
  table["aten::roll"] = {.plan = &roll};
  table["aten::repeat"] = {.plan = &repeat};
  table["aten::select_backward"] = {.plan = &select_backward};
  table["aten::slice_backward"] = {.plan = &slice_backward};
  table["aten::diagonal_backward"] = {.plan = &diagonal_backward};
  table["aten::unfold_backward"] = {.plan = &unfold_backward};
  for (const auto* name : {"aten::tril", "aten::tril_", "aten::triu", "aten::triu_"}) {
    table[name] = {.plan = &triangle};
  }
  table["aten::constant_pad_nd"] = {.plan = &pad};
}

}  // namespace lockstep::detail
