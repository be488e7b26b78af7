// Operators that show a tensor in another shape. Placements go through shape_map.h, sizes and strides are libtorch's
// own for the whole tensor, so that a view of a DTensor is contiguous where one device's would be.
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/ops/alias.h>
#include <ATen/ops/reshape.h>
#include <ATen/ops/split_with_sizes.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "lockstep/dtensor/rule.h"
#include "lockstep/dtensor/rules/shape.h"
#include "lockstep/dtensor/shape_map.h"
#include "lockstep/intercept/key.h"

namespace lockstep::detail {
namespace {

using Results = std::vector<at::Tensor>;

/// What the operator gives for a tensor of the whole sizes that has no memory; refuses what libtorch refuses.
Results whole_results(const RuleCall& call) {
  const c10::impl::ExcludeDispatchKeyGuard unseen(c10::DispatchKeySet({kInterceptKey, kKernelKey}));
  const auto& tensor = call.operands().front().tensor;
  torch::jit::Stack stack;
  stack.emplace_back(
      at::Tensor(at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type())));
  for (std::size_t i = 1; i < call.argument_count(); ++i) stack.push_back(call.argument(i));
  call.op().callBoxed(&stack);
  return stack.front().isTensorList() ? stack.front().toTensorVector() : Results{stack.front().toTensor()};
}

Plan view_plan(const Results& results, ShapeMap map) {
  Plan plan;
  for (const auto& each : results) {
    plan.result_sizes.push_back(each.sizes().vec());
    plan.result_strides.push_back(each.strides().vec());
  }
  plan.operand_placements = std::move(map.inputs);
  plan.result_placements = std::move(map.outputs);
  return plan;
}

const Operand& viewed(const RuleCall& call) {
  return call.operands().front();
}

const Placements& placements_of(const RuleCall& call) {
  return viewed(call).layout->placements();
}

int64_t dim_argument(const RuleCall& call, std::size_t index) {
  return RuleCall::dim_from_front(call.argument(index).toInt(), viewed(call).dim());
}

std::vector<int64_t> dims_argument(const RuleCall& call, std::size_t index) {
  auto dims = call.argument(index).toIntVector();
  for (auto& dim : dims) dim = RuleCall::dim_from_front(dim, viewed(call).dim());
  return dims;
}

/// A cut may have made it impossible to view what a rank holds: then it is copied.
torch::jit::Stack run_reshape(LocalCall& local) {
  return {at::reshape(local.arguments.front().toTensor(), local_sizes_in(*local.results.front()))};
}

/// No dims are joined, which is possible in any memory.
bool only_splits(const Sizes& from, const Sizes& to) {
  std::size_t next = 0;
  for (auto left : from) {
    for (; left != 1; left /= to[next++]) {
      if (next == to.size() || to[next] == 0 || left % to[next] != 0) return false;
    }
  }
  return std::all_of(to.begin() + static_cast<std::ptrdiff_t>(next), to.end(), [](auto size) { return size == 1; });
}

Plan view(const RuleCall& call) {
  const auto& operand = viewed(call);
  const auto& tensor = operand.tensor;
  auto to = at::infer_size(call.argument(1).toIntVector(), operand.layout->numel());
  auto strides = at::detail::computeStride(tensor.sizes(), tensor.strides(), to);
  auto map = map_view(operand.sizes(), to, call.mesh().shape(), placements_of(call));
  Plan plan;
  // Parts of different sizes may be copied on one rank and not on another, and all have to say the same.
  plan.is_copied = !strides || !(is_even(*operand.layout) || only_splits(operand.sizes(), to));
  plan.result_strides = {strides ? std::move(*strides) : at::detail::defaultStrides(to)};
  plan.result_sizes = {std::move(to)};
  plan.operand_placements = std::move(map.inputs);
  plan.result_placements = std::move(map.outputs);
  plan.run = &run_reshape;
  return plan;
}

Plan unsqueeze(const RuleCall& call) {
  const auto dims = viewed(call).dim();
  const auto results = whole_results(call);
  const auto dim = RuleCall::dim_from_front(call.argument(1).toInt(), dims + 1);
  return view_plan(results, map_unsqueeze(dims, dim, placements_of(call)));
}

/// All overloads. A dim of which a rank holds one index of several stays.
Plan squeeze(const RuleCall& call) {
  const auto& sizes = viewed(call).sizes();
  const auto results = whole_results(call);
  std::vector<int64_t> dims(sizes.size());
  std::iota(dims.begin(), dims.end(), int64_t{0});
  if (call.argument_count() > 1) {
    dims = call.argument(1).isInt() ? std::vector{dim_argument(call, 1)} : dims_argument(call, 1);
  }
  auto plan = view_plan(results, map_squeeze(sizes, dims, placements_of(call)));
  plan.run = &run_reshape;
  return plan;
}

Plan t(const RuleCall& call) {
  const auto results = whole_results(call);
  const auto dims = viewed(call).dim();
  return view_plan(results, map_transpose(dims, 0, std::max<int64_t>(dims - 1, 0), placements_of(call)));
}

Plan transpose(const RuleCall& call) {
  const auto results = whole_results(call);
  return view_plan(
      results, map_transpose(viewed(call).dim(), dim_argument(call, 1), dim_argument(call, 2), placements_of(call)));
}

Plan permute(const RuleCall& call) {
  const auto results = whole_results(call);
  return view_plan(results, map_permute(dims_argument(call, 1), placements_of(call)));
}

/// A dim that is repeated is whole on every rank.
Plan expand(const RuleCall& call) {
  const auto results = whole_results(call);
  auto plan = view_plan(results, map_expand(viewed(call).sizes(), results.front().sizes().vec(), placements_of(call)));
  plan.run = [](LocalCall& local) {
    local.arguments[1] = local_sizes_in(*local.results.front());
    return local.run();
  };
  return plan;
}

Plan select(const RuleCall& call) {
  const auto results = whole_results(call);
  return view_plan(results, map_select(viewed(call).dim(), dim_argument(call, 1), placements_of(call)));
}

Plan unbind(const RuleCall& call) {
  const auto results = whole_results(call);
  return view_plan(results, map_select(viewed(call).dim(), dim_argument(call, 1), placements_of(call), results.size()));
}

Plan slice(const RuleCall& call) {
  const auto results = whole_results(call);
  const auto& operand = viewed(call);
  const auto dim = dim_argument(call, 1);
  if (call.argument(4).toInt() != 1) {
    return view_plan(results, map_whole(operand.dim(), {dim}, placements_of(call)));
  }
  const auto size = operand.sizes()[static_cast<std::size_t>(dim)];
  const auto range = slice_range(call.argument(2), call.argument(3), size);
  auto plan = view_plan(results, map_ranges(operand.sizes(), dim, {range}, call.mesh().shape(), placements_of(call)));
  plan.run = [=](LocalCall& local) {
    const auto held = local_range(range, size, local.arguments.front().toTensor().size(dim));
    local.arguments[2] = held.begin;
    local.arguments[3] = held.end;
    return local.run();
  };
  return plan;
}

/// split of equal and of given sizes.
Plan split(const RuleCall& call) {
  const auto results = whole_results(call);
  const auto dim = dim_argument(call, 2);
  std::vector<ElementRange> ranges;
  int64_t begin = 0;
  for (const auto& each : results) {
    ranges.push_back({begin, begin + each.size(dim)});
    begin += each.size(dim);
  }
  auto plan =
      view_plan(results, map_ranges(viewed(call).sizes(), dim, ranges, call.mesh().shape(), placements_of(call)));
  plan.run = [dim](LocalCall& local) -> torch::jit::Stack {
    Sizes sizes;
    for (const auto& each : local.results) sizes.push_back(local_sizes_in(*each)[static_cast<std::size_t>(dim)]);
    return {at::split_with_sizes(local.arguments.front().toTensor(), sizes, dim)};
  };
  return plan;
}

/// The two dims become the last one.
Plan diagonal(const RuleCall& call) {
  const auto results = whole_results(call);
  const auto dims = viewed(call).dim();
  const auto first = dim_argument(call, 2);
  const auto second = dim_argument(call, 3);
  std::vector<std::optional<int64_t>> targets;
  int64_t next = 0;
  for (int64_t dim = 0; dim < dims; ++dim) {
    targets.push_back(dim == first || dim == second ? std::nullopt : std::optional(next++));
  }
  return view_plan(results, map_dims(targets, placements_of(call)));
}

/// Windows of a dim, which become the last one.
Plan unfold(const RuleCall& call) {
  const auto results = whole_results(call);
  return view_plan(results, map_whole(viewed(call).dim(), {dim_argument(call, 1)}, placements_of(call)));
}

/// The form in place: the dispatcher gives the DTensor its new shape. The local tensor's handle may be the program's.
template <Plan (*plan_of)(const RuleCall&)>
Plan in_place(const RuleCall& call) {
  auto plan = plan_of(call);
  plan.run = [run = std::move(plan.run)](LocalCall& local) {
    local.arguments.front() = at::alias(local.arguments.front().toTensor());
    return run ? run(local) : local.run();
  };
  return plan;
}

Plan refuse_strides(const RuleCall& call) {
  TORCH_CHECK(false, call.describe(),
              ": strides say nothing of a tensor that lies on several ranks. Use view(), transpose() or a slice, or "
              "as_strided() on to_local().");
}

}  // namespace

void add_shape_rules(RuleTable& table) {
  table["aten::view"] = {.plan = &view};
  table["aten::_unsafe_view"] = {.plan = &view};
  table["aten::_reshape_alias"] = {.plan = &view};
  table["aten::unsqueeze"] = {.plan = &unsqueeze};
  table["aten::unsqueeze_"] = {.plan = &in_place<&unsqueeze>};
  table["aten::squeeze"] = {.plan = &squeeze};
  table["aten::squeeze_"] = {.plan = &in_place<&squeeze>};
  table["aten::t"] = {.plan = &t};
  table["aten::t_"] = {.plan = &in_place<&t>};
  table["aten::transpose.int"] = {.plan = &transpose};
  table["aten::transpose_"] = {.plan = &in_place<&transpose>};
  table["aten::permute"] = {.plan = &permute};
  table["aten::expand"] = {.plan = &expand};
  table["aten::select.int"] = {.plan = &select};
  table["aten::unbind.int"] = {.plan = &unbind};
  table["aten::slice.Tensor"] = {.plan = &slice};
  for (const auto* name :
       {"aten::split.Tensor", "aten::split_with_sizes", "aten::unsafe_split.Tensor", "aten::unsafe_split_with_sizes"}) {
    table[name] = {.plan = &split};
  }
  table["aten::diagonal"] = {.plan = &diagonal};
  table["aten::unfold"] = {.plan = &unfold};
  table["aten::as_strided"] = {.plan = &refuse_strides};
  table["aten::as_strided_"] = {.plan = &refuse_strides};
}

}  // namespace lockstep::detail
