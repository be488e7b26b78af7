// Operators that keep the values, or make tensors like another one.
#include "lockstep/dtensor/rule.h"

namespace lockstep::detail {
namespace {

/// Terms stay terms, of every reduction.
Plan keep(const RuleCall& call) {
  Plan plan;
  plan.result_sizes = {call.operands().front().sizes()};
  plan.operand_placements = {call.operands().front().layout->placements()};
  plan.result_placements = plan.operand_placements;
  return plan;
}

bool same_dtype(const RuleCall& call) {
  return call.operands().front().tensor.scalar_type() == call.operands().back().tensor.scalar_type();
}

/// Terms of a sum stay terms if they lose nothing by being cast one by one.
bool casts_terms(at::ScalarType from, at::ScalarType to, const Placement& placement) {
  if (from == to) return true;
  if (at::isFloatingType(from)) return can_be_terms(from, placement) && at::isFloatingType(to);
  return to != at::kBool && can_be_terms(from, placement);
}

Plan cast(const RuleCall& call) {
  auto plan = keep(call);
  const auto& dtype = call.argument(1);
  if (dtype.isNone()) return plan;
  const auto from = call.operands().front().tensor.scalar_type();
  for (auto& each : plan.operand_placements.front()) {
    if (is_partial(each) && !casts_terms(from, dtype.toScalarType(), each)) each = Replicate();
  }
  plan.result_placements = plan.operand_placements;
  return plan;
}

/// The bits of terms have no sum.
Plan view_bits(const RuleCall& call) {
  const auto& operand = call.operands().front();
  TORCH_CHECK(static_cast<int64_t>(c10::elementSize(call.argument(1).toScalarType())) == operand.tensor.element_size(),
              call.describe(),
              ": a DTensor cannot be viewed in a dtype of another size. Use to_local() or full_tensor() first.");
  auto plan = keep(call);
  plan.operand_placements = {gradient_placements(operand.layout->placements())};
  plan.result_placements = plan.operand_placements;
  return plan;
}

/// Whatever the target holds, terms of any reduction included: of the source the same are copied.
Plan copy_into(const RuleCall& call) {
  auto plan = pointwise_plan(call, Linearity::kAdditive);
  plan.choices = [&call, sums = plan.choices](int64_t axis) {
    auto choices = sums(axis);
    const auto& held = call.operands().front().on(axis);
    const bool is_same = held == call.operands().back().on(axis);
    if (is_partial(held) && is_same && same_dtype(call)) {
      choices.push_back({.operands = {held, held}, .results = {held}});
    }
    return choices;
  };
  return plan;
}

/// Each rank makes its part; what is not cut is whole on every rank.
Plan like(const RuleCall& call) {
  auto plan = keep(call);
  plan.result_placements = {gradient_placements(plan.operand_placements.front())};
  return plan;
}

/// Zero is the sum of zeros. Other numbers are not.
Plan fill(const RuleCall& call) {
  TORCH_CHECK(!call.operands().front().layout->has_partial(), call.describe(),
              ": a tensor of terms cannot be filled. Use redistribute() first.");
  return pointwise_plan(call, Linearity::kNone);
}

}  // namespace

void add_copy_rules(RuleTable& table) {
  for (const auto* name : {"aten::clone", "aten::detach", "aten::alias", "aten::lift_fresh", "aten::detach_",
                           "aten::zero_", "aten::_conj", "aten::resolve_conj", "aten::resolve_neg"}) {
    table[name] = {.plan = &keep, .is_pointwise = true};
  }
  table["aten::_to_copy"] = {.plan = &cast, .is_pointwise = true};
  table["aten::view.dtype"] = {.plan = &view_bits, .is_pointwise = false};
  table["aten::copy_"] = {.plan = &copy_into, .is_pointwise = false};
  table["aten::fill_.Scalar"] = {.plan = &fill, .is_pointwise = false};
  table["aten::fill_.Tensor"] = {.plan = &fill, .is_pointwise = false};
  for (const auto* name : {"aten::zeros_like", "aten::ones_like", "aten::empty_like", "aten::full_like"}) {
    table[name] = {.plan = &like, .is_pointwise = false};
  }
}

}  // namespace lockstep::detail
