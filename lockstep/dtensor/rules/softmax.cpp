// Softmax and its logarithm: the dim they are taken over is whole on every rank. In a LossParallel scope log_softmax
// leaves it cut: ranks exchange the largest logit and the sum of exponentials of each row.
#include <ATen/ops/full.h>

#include <limits>

#include "lockstep/comm/collectives.h"
#include "lockstep/dtensor/rule.h"
#include "lockstep/dtensor/rules/loss.h"

namespace lockstep::detail {
namespace {

/// All operands and the result have the same sizes, and are cut alike: in other dims, and in this one as far as
/// `stays_cut` says.
Plan softmax_plan(const RuleCall& call, int64_t given_dim,
                  const std::function<bool(int64_t axis, const Placement&)>& stays_cut = {}) {
  Plan plan;
  const auto& sizes = call.operands().front().sizes();
  const auto dim = RuleCall::dim_from_front(given_dim, static_cast<int64_t>(sizes.size()));
  plan.result_sizes = {sizes};
  plan.choices = [&call, dim, stays_cut](int64_t axis) {
    std::vector<Choice> choices;
    for (const auto& cut : cuts_on(call, axis, [](std::size_t, int64_t each) { return each; })) {
      if (sharded_dim(cut) == dim && !(stays_cut && stays_cut(axis, cut))) continue;
      choices.push_back({.operands = Placements(call.operands().size(), cut), .results = {cut}});
    }
    choices.push_back(replicate_all(call));
    return choices;
  };
  return plan;
}

Plan softmax(const RuleCall& call) {
  return softmax_plan(call, call.argument(1).toInt());
}

Plan softmax_backward(const RuleCall& call) {
  return softmax_plan(call, call.argument(2).toInt());
}

std::vector<GroupPtr> groups_cutting(const Layout& layout, int64_t dim) {
  std::vector<GroupPtr> groups;
  for (std::size_t axis = 0; axis < layout.placements().size(); ++axis) {
    if (sharded_dim(layout.placements()[axis]) == dim) {
      groups.push_back(layout.mesh().get_group(static_cast<int64_t>(axis)));
    }
  }
  return groups;
}

bool is_low_precision(at::ScalarType dtype) {
  return dtype == at::kHalf || dtype == at::kBFloat16;
}

torch::jit::Stack log_softmax_of_parts(const at::Tensor& part, int64_t dim, bool half_to_float,
                                       const std::vector<GroupPtr>& groups) {
  const auto dtype = half_to_float ? at::kFloat : part.scalar_type();
  const auto x = is_low_precision(part.scalar_type()) ? part.to(at::kFloat) : part;
  auto sizes = x.sizes().vec();
  sizes[static_cast<std::size_t>(dim)] = 1;
  const auto largest =
      x.size(dim) > 0 ? x.amax(dim, true) : at::full(sizes, -std::numeric_limits<double>::infinity(), x.options());
  for (const auto& group : groups) all_reduce(largest, group, ReduceOp::MAX);
  const auto shifted = x - largest;
  const auto sum = shifted.exp().sum(dim, true);
  for (const auto& group : groups) all_reduce(sum, group);
  return {(shifted - sum.log()).to(dtype)};
}

Plan log_softmax(const RuleCall& call) {
  if (loss_parallel_depth() == 0) return softmax(call);
  auto plan = softmax_plan(call, call.argument(1).toInt(), [](int64_t, const Placement&) { return true; });
  plan.run = [](LocalCall& local) {
    const auto& layout = *local.operands.front();
    const auto part = local.arguments[0].toTensor();
    const auto dim = RuleCall::dim_from_front(local.arguments[1].toInt(), part.dim());
    const auto groups = groups_cutting(layout, dim);
    return groups.empty() ? local.run() : log_softmax_of_parts(part, dim, local.arguments[2].toBool(), groups);
  };
  return plan;
}

/// grad_output, output, dim, input_dtype. The output is cut in this dim if the scope left it so.
Plan log_softmax_backward(const RuleCall& call) {
  const auto& output = call.operands().at(1);
  auto plan = softmax_plan(call, call.argument(2).toInt(),
                           [&output](int64_t axis, const Placement& cut) { return output.on(axis) == cut; });
  plan.run = [](LocalCall& local) -> torch::jit::Stack {
    const auto gradient = local.arguments[0].toTensor();
    const auto dim = RuleCall::dim_from_front(local.arguments[2].toInt(), gradient.dim());
    const auto groups = groups_cutting(*local.operands.front(), dim);
    if (groups.empty()) return local.run();
    auto sums = take_class_sums(gradient);
    const bool is_low = is_low_precision(gradient.scalar_type());
    if (!sums.defined()) {
      sums = (is_low ? gradient.to(at::kFloat) : gradient).sum(dim, true);
      for (const auto& group : groups) all_reduce(sums, group);
    }
    const auto logarithms = local.arguments[1].toTensor();
    const auto probabilities = (is_low ? logarithms.to(at::kFloat) : logarithms).exp();
    return {(gradient - probabilities * sums).to(local.arguments[3].toScalarType())};
  };
  return plan;
}

}  // namespace

void add_softmax_rules(RuleTable& table) {
  table["aten::_softmax."] = {.plan = &softmax};
  table["aten::_safe_softmax."] = {.plan = &softmax};
  table["aten::_softmax_backward_data."] = {.plan = &softmax_backward};
  table["aten::_log_softmax."] = {.plan = &log_softmax};
  table["aten::_log_softmax_backward_data."] = {.plan = &log_softmax_backward};
}

}  // namespace lockstep::detail
