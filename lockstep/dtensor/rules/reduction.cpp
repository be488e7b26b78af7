// Operators that reduce some dims of a tensor. Where a reduced dim is cut each rank reduces its part, and what comes
// out is a term of the result, if the operator can be put together from such terms; else the dim is gathered.
#include "lockstep/dtensor/rules/reduction.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "lockstep/comm/collectives.h"

namespace lockstep::detail {

int64_t Reduction::result_dim(int64_t dim) const {
  if (keeps_dims) return dim;
  return std::count(reduced.begin(), reduced.begin() + dim, false);
}

Sizes Reduction::result_sizes(const Sizes& sizes) const {
  Sizes result;
  for (std::size_t dim = 0; dim < sizes.size(); ++dim) {
    if (!reduced[dim]) result.push_back(sizes[dim]);
    if (reduced[dim] && keeps_dims) result.push_back(1);
  }
  return result;
}

int64_t Reduction::count(const Sizes& sizes) const {
  int64_t product = 1;
  for (std::size_t dim = 0; dim < sizes.size(); ++dim) product *= reduced[dim] ? sizes[dim] : 1;
  return product;
}

std::vector<int64_t> Reduction::axes_of(const Layout& layout) const {
  std::vector<int64_t> axes;
  for (std::size_t axis = 0; axis < layout.placements().size(); ++axis) {
    const auto dim = sharded_dim(layout.placements()[axis]);
    if (dim && reduces(*dim)) axes.push_back(static_cast<int64_t>(axis));
  }
  return axes;
}

Reduction reduction_of(const RuleCall& call, const c10::IValue* dims, bool keeps_dims) {
  const auto count = call.operands().front().dim();
  const auto all = dims == nullptr || dims->isNone() || (dims->isIntList() && dims->toIntVector().empty());
  Reduction reduction{.reduced = std::vector<bool>(static_cast<std::size_t>(count), all), .keeps_dims = keeps_dims};
  if (all) return reduction;
  const auto chosen = dims->isInt() ? std::vector<int64_t>{dims->toInt()} : dims->toIntVector();
  for (const auto dim : chosen) {
    if (count > 0) reduction.reduced.at(static_cast<std::size_t>(RuleCall::dim_from_front(dim, count))) = true;
  }
  return reduction;
}

Reduction reduction_of_all(const RuleCall& call) {
  return reduction_of(call, nullptr, false);
}

Plan whole_dims_plan(const RuleCall& call, const Reduction& reduction, std::size_t result_count) {
  Plan plan;
  plan.result_sizes.assign(result_count, reduction.result_sizes(call.operands().front().sizes()));
  plan.choices = [&call, reduction, result_count](int64_t axis) -> std::vector<Choice> {
    const auto& held = call.operands().front().on(axis);
    const auto dim = sharded_dim(held);
    if (!dim || reduction.reduces(*dim)) return {replicate_all(call, result_count)};
    return {{.operands = {held}, .results = Placements(result_count, cut_of(held, reduction.result_dim(*dim)))}};
  };
  return plan;
}

namespace {

Reduction reduction_at(const RuleCall& call, std::size_t dims) {
  return reduction_of(call, &call.argument(dims), call.argument(dims + 1).toBool());
}

/// Reductions that parts can be reduced by and then the parts' results: a cut of a reduced dim leaves terms. Terms that
/// wait for this very reduction already stay so.
Plan terms_plan(const RuleCall& call, const Reduction& reduction, ReduceOp op) {
  Plan plan;
  plan.result_sizes = {reduction.result_sizes(call.operands().front().sizes())};
  plan.choices = [&call, reduction, op](int64_t axis) -> std::vector<Choice> {
    const auto& held = call.operands().front().on(axis);
    const auto dim = sharded_dim(held);
    const bool stays = op == ReduceOp::SUM ? is_linear_partial(held) : held == Placement(Partial(op));
    if (stays) return {{.operands = {held}, .results = {held}}};
    if (!dim) return {replicate_all(call)};
    return {{.operands = {held},
             .results = {reduction.reduces(*dim) ? Placement(Partial(op)) : cut_of(held, reduction.result_dim(*dim))}}};
  };
  return plan;
}

Plan sum_all(const RuleCall& call) {
  return terms_plan(call, reduction_of_all(call), ReduceOp::SUM);
}

Plan sum_dims(const RuleCall& call) {
  return terms_plan(call, reduction_at(call, 1), ReduceOp::SUM);
}

/// Its share of the elements makes a part's mean a term, however uneven the parts are.
Plan mean_plan(const RuleCall& call, const Reduction& reduction) {
  auto plan = terms_plan(call, reduction, ReduceOp::SUM);
  plan.run = [reduction](LocalCall& local) {
    const auto all = reduction.count(local.operands.front()->sizes());
    const auto mine = reduction.count(local.operands.front()->local_sizes());
    auto stack = local.run();
    if (mine == all) return stack;
    const auto mean = stack.front().toTensor();
    stack.front() = mine == 0 ? at::zeros_like(mean) : mean.mul(static_cast<double>(mine) / static_cast<double>(all));
    return stack;
  };
  return plan;
}

Plan mean_all(const RuleCall& call) {
  return mean_plan(call, reduction_of_all(call));
}

Plan mean_dims(const RuleCall& call) {
  return mean_plan(call, reduction_at(call, 1));
}

Plan prod_all(const RuleCall& call) {
  return terms_plan(call, reduction_of_all(call), ReduceOp::PRODUCT);
}

Plan prod_dim(const RuleCall& call) {
  return terms_plan(call, reduction_at(call, 1), ReduceOp::PRODUCT);
}

/// What leaves every maximum, or every minimum, as it is.
at::Scalar neutral(at::ScalarType dtype, ReduceOp op) {
  const bool is_max = op == ReduceOp::MAX;
  if (!c10::isIntegralType(dtype, /*includeBool=*/false)) {
    const auto infinity = std::numeric_limits<double>::infinity();
    return is_max ? -infinity : infinity;
  }
  at::Scalar value;
  AT_DISPATCH_INTEGRAL_TYPES(dtype, "neutral", [&] {
    using Limits = std::numeric_limits<scalar_t>;
    value = static_cast<int64_t>(is_max ? Limits::lowest() : Limits::max());
  });
  return value;
}

Plan extremum_plan(const RuleCall& call, const Reduction& reduction, ReduceOp op) {
  // Not all backends reduce booleans.
  if (call.operands().front().tensor.scalar_type() == at::kBool) return whole_dims_plan(call, reduction);
  auto plan = terms_plan(call, reduction, op);
  plan.run = [&call, op](LocalCall& local) -> torch::jit::Stack {
    const auto part = local.arguments.front().toTensor();
    if (part.numel() > 0 || call.operands().front().layout->numel() == 0) return local.run();
    return {at::full(local.results.front()->local_sizes(), neutral(part.scalar_type(), op), part.options())};
  };
  return plan;
}

Plan amax(const RuleCall& call) {
  return extremum_plan(call, reduction_at(call, 1), ReduceOp::MAX);
}

Plan amin(const RuleCall& call) {
  return extremum_plan(call, reduction_at(call, 1), ReduceOp::MIN);
}

Plan max_all(const RuleCall& call) {
  return extremum_plan(call, reduction_of_all(call), ReduceOp::MAX);
}

Plan min_all(const RuleCall& call) {
  return extremum_plan(call, reduction_of_all(call), ReduceOp::MIN);
}

/// Each rank reduces its part, and `combine` brings the parts together along the axes that cut a reduced dim: for
/// results that no Partial can stand for.
Plan combined_plan(const RuleCall& call, const Reduction& reduction,
                   const std::function<at::Tensor(LocalCall&, const std::vector<int64_t>& axes)>& combine) {
  auto plan = whole_dims_plan(call, reduction);
  plan.choices = [&call, reduction](int64_t axis) -> std::vector<Choice> {
    const auto& held = call.operands().front().on(axis);
    const auto dim = sharded_dim(held);
    if (!dim) return {replicate_all(call)};
    return {{.operands = {held},
             .results = {reduction.reduces(*dim) ? Placement(Replicate()) : cut_of(held, reduction.result_dim(*dim))}}};
  };
  plan.run = [reduction, combine](LocalCall& local) -> torch::jit::Stack {
    const auto axes = reduction.axes_of(*local.operands.front());
    if (axes.empty()) return local.run();
    return {combine(local, axes)};
  };
  return plan;
}

void reduce_along(const at::Tensor& tensor, const DeviceMesh& mesh, const std::vector<int64_t>& axes, ReduceOp op) {
  for (const auto axis : axes) all_reduce(tensor, mesh.get_group(axis), op);
}

/// As bytes, since not all backends reduce booleans.
Plan truth_plan(const RuleCall& call, const Reduction& reduction, ReduceOp op) {
  return combined_plan(call, reduction, [op](LocalCall& local, const std::vector<int64_t>& axes) {
    const auto part = local.run().front().toTensor();
    const auto bytes = part.to(at::kByte);
    reduce_along(bytes, local.call.mesh(), axes, op);
    return bytes.to(part.scalar_type());
  });
}

Plan any_all(const RuleCall& call) {
  return truth_plan(call, reduction_of_all(call), ReduceOp::MAX);
}

Plan all_all(const RuleCall& call) {
  return truth_plan(call, reduction_of_all(call), ReduceOp::MIN);
}

/// An empty list of dims means none here.
Reduction truth_dims(const RuleCall& call) {
  auto reduction = reduction_at(call, 1);
  const auto& dims = call.argument(1);
  if (dims.isIntList() && dims.toIntVector().empty()) reduction.reduced.assign(reduction.reduced.size(), false);
  return reduction;
}

Plan any_dims(const RuleCall& call) {
  return truth_plan(call, truth_dims(call), ReduceOp::MAX);
}

Plan all_dims(const RuleCall& call) {
  return truth_plan(call, truth_dims(call), ReduceOp::MIN);
}

/// By powers of the parts' norms; in single precision at least, in which they do not overflow.
at::Tensor combined_norm(LocalCall& local, const std::vector<int64_t>& axes, double order) {
  const bool is_empty = local.arguments.front().toTensor().numel() == 0;
  const auto& mesh = local.call.mesh();
  if (std::isinf(order)) {
    const auto part_options = local.arguments.front().toTensor().options();
    // Of no elements it is refused: zero is below every norm.
    auto part =
        is_empty
            ? at::full(local.results.front()->local_sizes(), order > 0 ? 0.0 : std::numeric_limits<double>::infinity(),
                       part_options.dtype(c10::toRealValueType(c10::typeMetaToScalarType(part_options.dtype()))))
            : local.run().front().toTensor();
    reduce_along(part, mesh, axes, order > 0 ? ReduceOp::MAX : ReduceOp::MIN);
    return part;
  }
  const auto part = local.run().front().toTensor();
  const auto dtype = part.scalar_type();
  const bool is_small = dtype == at::kHalf || dtype == at::kBFloat16;
  auto powers = is_small ? part.to(at::kFloat) : part;
  if (order == 0) {
    reduce_along(powers, mesh, axes, ReduceOp::SUM);
    return powers.to(dtype);
  }
  powers = powers.pow(order);
  reduce_along(powers, mesh, axes, ReduceOp::SUM);
  return powers.pow(1 / order).to(dtype);
}

Plan norm_plan(const RuleCall& call, const Reduction& reduction) {
  const auto& given = call.argument(1);
  const auto order = given.isNone() ? 2.0 : given.toScalar().toDouble();
  // Negative powers of parts without elements are no numbers.
  if (order < 0 && !std::isinf(order)) return whole_dims_plan(call, reduction);
  return combined_plan(call, reduction, [order](LocalCall& local, const std::vector<int64_t>& axes) {
    return combined_norm(local, axes, order);
  });
}

Plan norm_all(const RuleCall& call) {
  return norm_plan(call, reduction_of_all(call));
}

Plan norm_dims(const RuleCall& call) {
  return norm_plan(call, reduction_at(call, 2));
}

Plan whole_all(const RuleCall& call) {
  return whole_dims_plan(call, reduction_of_all(call));
}

/// logsumexp, argmax, nanmedian: dims, and whether they are kept.
Plan whole_at_one(const RuleCall& call) {
  return whole_dims_plan(call, reduction_at(call, 1));
}

/// var and std: dims, correction, and whether they are kept.
Plan variance_plan(const RuleCall& call, std::size_t result_count) {
  auto plan = whole_dims_plan(call, reduction_of(call, &call.argument(1), call.argument(3).toBool()), result_count);
  plan.run = [&call](LocalCall& local) -> torch::jit::Stack {
    const auto part = local.arguments.front().toTensor();
    if (part.numel() > 0 || call.operands().front().layout->numel() == 0) return local.run();
    // A rank without rows would be warned that it has too few elements.
    const auto dtype = c10::toRealValueType(part.scalar_type());
    torch::jit::Stack results;
    for (const auto& each : local.results)
      results.emplace_back(at::zeros(each->local_sizes(), part.options().dtype(dtype)));
    return results;
  };
  return plan;
}

Plan variance(const RuleCall& call) {
  return variance_plan(call, 1);
}

Plan variance_and_mean(const RuleCall& call) {
  return variance_plan(call, 2);
}

Plan minimum_and_maximum(const RuleCall& call) {
  return whole_dims_plan(call, reduction_at(call, 1), 2);
}

/// Its value, the same on every rank.
Plan item(const RuleCall& call) {
  Plan plan;
  plan.choices = [&call](int64_t) -> std::vector<Choice> { return {replicate_all(call, 0)}; };
  return plan;
}

/// Each rank compares its part; all get the answer.
Plan equal(const RuleCall& call) {
  const auto& first = call.operands().at(0);
  const auto& second = call.operands().at(1);
  Plan plan;
  if (first.sizes() != second.sizes()) {
    plan.operand_placements = {first.layout->placements(), second.layout->placements()};
    plan.run = [](LocalCall&) -> torch::jit::Stack { return {false}; };
    return plan;
  }
  plan.choices = [&call](int64_t axis) {
    std::vector<Choice> choices;
    for (const auto& operand : call.operands()) {
      if (is_cut(operand.on(axis))) choices.push_back({.operands = Placements(2, operand.on(axis)), .results = {}});
    }
    choices.push_back(replicate_all(call, 0));
    return choices;
  };
  plan.run = [](LocalCall& local) -> torch::jit::Stack {
    const auto& layout = *local.operands.front();
    const auto device = local.arguments.front().toTensor().options();
    const bool mine = local.run().front().toBool();
    // Along all axes: ranks of one may differ in what they hold as replicas, and all must go on alike.
    const auto answer = at::full({1}, mine ? 1 : 0, device.dtype(at::kByte));
    std::vector<int64_t> axes(layout.placements().size());
    std::iota(axes.begin(), axes.end(), int64_t{0});
    reduce_along(answer, layout.mesh(), axes, ReduceOp::MIN);
    return {answer.item<int64_t>() == 1};
  };
  return plan;
}

}  // namespace

void add_reduction_rules(RuleTable& table) {
  table["aten::sum."] = {.plan = &sum_all};
  table["aten::sum.dim_IntList"] = {.plan = &sum_dims};
  table["aten::nansum."] = {.plan = &sum_dims};
  table["aten::mean."] = {.plan = &mean_all};
  table["aten::mean.dim"] = {.plan = &mean_dims};
  table["aten::prod."] = {.plan = &prod_all};
  table["aten::prod.dim_int"] = {.plan = &prod_dim};
  table["aten::amax."] = {.plan = &amax};
  table["aten::amin."] = {.plan = &amin};
  table["aten::max."] = {.plan = &max_all};
  table["aten::min."] = {.plan = &min_all};
  table["aten::aminmax."] = {.plan = &minimum_and_maximum};
  table["aten::any."] = {.plan = &any_all};
  table["aten::any.dim"] = {.plan = &any_dims};
  table["aten::any.dims"] = {.plan = &any_dims};
  table["aten::all."] = {.plan = &all_all};
  table["aten::all.dim"] = {.plan = &all_dims};
  table["aten::all.dims"] = {.plan = &all_dims};
  table["aten::linalg_vector_norm."] = {.plan = &norm_dims};
  table["aten::norm.ScalarOpt_dim"] = {.plan = &norm_dims};
  table["aten::norm.ScalarOpt_dim_dtype"] = {.plan = &norm_dims};
  table["aten::norm.Scalar"] = {.plan = &norm_all};
  table["aten::norm.ScalarOpt_dtype"] = {.plan = &norm_all};
  table["aten::var.correction"] = {.plan = &variance};
  table["aten::std.correction"] = {.plan = &variance};
  table["aten::var_mean.correction"] = {.plan = &variance_and_mean};
  table["aten::std_mean.correction"] = {.plan = &variance_and_mean};
  table["aten::logsumexp."] = {.plan = &whole_at_one};
  table["aten::argmax."] = {.plan = &whole_at_one};
  table["aten::argmin."] = {.plan = &whole_at_one};
  table["aten::median."] = {.plan = &whole_all};
  table["aten::nanmedian."] = {.plan = &whole_all};
  table["aten::_local_scalar_dense."] = {.plan = &item};
  table["aten::equal."] = {.plan = &equal};
}

}  // namespace lockstep::detail
