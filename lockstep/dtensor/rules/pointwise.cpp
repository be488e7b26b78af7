// Operators that work element by element, on operands that are broadcast against each other.
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <initializer_list>

#include "lockstep/base/str.h"
#include "lockstep/dtensor/rule.h"

namespace lockstep::detail {

Sizes broadcast_sizes(const RuleCall& call) {
  Sizes result;
  for (const auto& operand : call.operands()) {
    if (operand.is_out) continue;
    const auto& sizes = operand.sizes();
    if (sizes.size() > result.size()) result.insert(result.begin(), sizes.size() - result.size(), 1);
    const auto offset = result.size() - sizes.size();
    for (std::size_t d = 0; d < sizes.size(); ++d) {
      auto& size = result[offset + d];
      if (size == 1) {
        size = sizes[d];
      } else {
        TORCH_CHECK(sizes[d] == 1 || sizes[d] == size, call.describe(), ": the sizes do not broadcast.");
      }
    }
  }
  for (const auto& operand : call.operands()) {
    TORCH_CHECK(!operand.is_written || operand.sizes() == result, call.describe(), ": the result has sizes [",
                join(result, ", "), "], and what it is written into has others.");
  }
  return result;
}

bool can_be_terms(at::ScalarType dtype, const Placement& placement) {
  if (!is_linear_partial(placement)) return false;
  if (at::isFloatingType(dtype) || at::isComplexType(dtype)) return true;
  return dtype != at::kBool && std::get<Partial>(placement).op == ReduceOp::SUM;
}

namespace {

/// Of terms, all of them.
bool can_all_be_terms(const RuleCall& call, const Operand& first, const Placement& terms) {
  // Terms in another dtype than the sum are rounded one by one, which whole numbers do not bear.
  const auto dtype = first.tensor.scalar_type();
  return std::all_of(call.operands().begin(), call.operands().end(), [&](const Operand& each) {
    const auto its = each.tensor.scalar_type();
    const bool is_exact = its == dtype || (at::isFloatingType(its) && at::isFloatingType(dtype));
    return is_exact && can_be_terms(its, terms);
  });
}

void add_additive_choices(const RuleCall& call, int64_t axis, std::vector<Choice>& choices) {
  for (const auto& operand : call.operands()) {
    const auto& terms = operand.on(axis);
    if (!is_linear_partial(terms) || !can_all_be_terms(call, operand, terms)) continue;
    choices.push_back({.operands = Placements(call.operands().size(), terms), .results = {terms}});
  }
}

/// Of terms in one of the factors; a divisor must be whole.
void add_factor_choices(const RuleCall& call, int64_t axis, std::vector<Choice>& choices) {
  const auto& operands = call.operands();
  const bool is_product = call.name() == "aten::mul" || call.name() == "aten::mul_";
  for (std::size_t i = 0; i < (is_product ? operands.size() : 1); ++i) {
    const auto& terms = operands[i].on(axis);
    if (operands[i].is_out || !can_be_terms(operands[i].tensor.scalar_type(), terms)) continue;
    auto choice = replicate_all(call);
    choice.operands[i] = terms;
    choice.results.front() = terms;
    choices.push_back(std::move(choice));
  }
}

}  // namespace

Plan pointwise_plan(const RuleCall& call, Linearity linearity) {
  Plan plan;
  plan.result_sizes = {broadcast_sizes(call)};
  plan.choices = [&call, linearity, sizes = plan.result_sizes.front()](int64_t axis) {
    const auto dims = static_cast<int64_t>(sizes.size());
    const auto& operands = call.operands();
    // Where dim `dim` of an operand lies in the result: nowhere if it is repeated there.
    const auto dim_in_result = [&](std::size_t operand, int64_t dim) {
      const auto result_dim = dim + dims - operands[operand].dim();
      return operands[operand].sizes()[static_cast<std::size_t>(dim)] == sizes[static_cast<std::size_t>(result_dim)]
                 ? result_dim
                 : int64_t{-1};
    };
    std::vector<Choice> choices;
    for (const auto& cut : cuts_on(call, axis, dim_in_result)) {
      auto choice = replicate_all(call);
      for (std::size_t i = 0; i < operands.size(); ++i) {
        const auto dim = *sharded_dim(cut) - dims + operands[i].dim();
        if (dim >= 0 && dim_in_result(i, dim) >= 0) choice.operands[i] = cut_of(cut, dim);
      }
      choice.results.front() = cut;
      choices.push_back(std::move(choice));
    }
    if (linearity == Linearity::kAdditive) add_additive_choices(call, axis, choices);
    if (linearity == Linearity::kFactor) add_factor_choices(call, axis, choices);
    choices.push_back(replicate_all(call));
    return choices;
  };
  return plan;
}

namespace {

Plan nonlinear(const RuleCall& call) {
  return pointwise_plan(call, Linearity::kNone);
}

Plan additive(const RuleCall& call) {
  return pointwise_plan(call, Linearity::kAdditive);
}

Plan factor(const RuleCall& call) {
  return pointwise_plan(call, Linearity::kFactor);
}

/// Zero is zero in every term: a mask that fills with it is a factor.
Plan masked_fill(const RuleCall& call) {
  return pointwise_plan(call, call.argument(2).toScalar().equal(0) ? Linearity::kFactor : Linearity::kNone);
}

/// Its second result is for the backward pass, and empty on some devices: there it is given the sizes it should have.
Plan log_sigmoid(const RuleCall& call) {
  auto plan = pointwise_plan(call, Linearity::kNone);
  plan.result_sizes.push_back(plan.result_sizes.front());
  plan.choices = [one = plan.choices](int64_t axis) {
    auto choices = one(axis);
    for (auto& choice : choices) choice.results.push_back(choice.results.front());
    return choices;
  };
  plan.run = [](LocalCall& local) {
    auto results = local.run();
    const auto result = results[0].toTensor();
    if (results[1].toTensor().sizes() != result.sizes()) results[1] = at::empty_like(result);
    return results;
  };
  return plan;
}

/// In place: one rank adds the number to its term.
Plan add_number(const RuleCall& call) {
  auto plan = nonlinear(call);
  plan.choices = [&call, whole = plan.choices](int64_t axis) -> std::vector<Choice> {
    const auto& held = call.operands().front().on(axis);
    if (!is_linear_partial(held)) return whole(axis);
    return {{.operands = {held}, .results = {held}}};
  };
  plan.run = [](LocalCall& local) -> torch::jit::Stack {
    const auto& coordinate = *local.call.mesh().get_coordinate();
    for (std::size_t axis = 0; axis < coordinate.size(); ++axis) {
      const bool is_sum = local.operands.front()->placements()[axis] == Placement(Partial());
      if (is_sum && coordinate[axis] != 0) return {local.arguments.front()};
    }
    return local.run();
  };
  return plan;
}

// By base name; each has a form that works in place.
constexpr auto kNonlinear = {"abs",
                             "acos",
                             "acosh",
                             "angle",
                             "asin",
                             "asinh",
                             "atan",
                             "atan2",
                             "atanh",
                             "bitwise_and",
                             "bitwise_not",
                             "bitwise_or",
                             "bitwise_xor",
                             "bitwise_left_shift",
                             "bitwise_right_shift",
                             "ceil",
                             "celu",
                             "clamp",
                             "clamp_max",
                             "clamp_min",
                             "copysign",
                             "cos",
                             "cosh",
                             "digamma",
                             "elu",
                             "erf",
                             "erfc",
                             "erfinv",
                             "exp",
                             "exp2",
                             "expm1",
                             "floor",
                             "fmod",
                             "frac",
                             "gelu",
                             "hardshrink",
                             "hardsigmoid",
                             "hardswish",
                             "hardtanh",
                             "hypot",
                             "leaky_relu",
                             "lerp",
                             "lgamma",
                             "log",
                             "log10",
                             "log1p",
                             "log2",
                             "logical_and",
                             "logical_not",
                             "logical_or",
                             "logical_xor",
                             "logit",
                             "masked_fill",
                             "mish",
                             "nan_to_num",
                             "pow",
                             "reciprocal",
                             "relu",
                             "relu6",
                             "remainder",
                             "round",
                             "rsqrt",
                             "sgn",
                             "sigmoid",
                             "sign",
                             "silu",
                             "sin",
                             "sinc",
                             "sinh",
                             "softplus",
                             "softshrink",
                             "sqrt",
                             "tan",
                             "tanh",
                             "threshold",
                             "trunc",
                             "xlogy",
                             "eq",
                             "ne",
                             "lt",
                             "le",
                             "gt",
                             "ge",
                             "floor_divide",
                             "addcmul",
                             "addcdiv",
                             "i0",
                             "square",
                             "heaviside",
                             "polygamma",
                             "nextafter"};

// Without a form in place.
constexpr auto kNonlinearOnly = {"maximum",
                                 "minimum",
                                 "fmax",
                                 "fmin",
                                 "where",
                                 "isnan",
                                 "isinf",
                                 "isfinite",
                                 "isposinf",
                                 "isneginf",
                                 "signbit",
                                 "threshold_backward",
                                 "gelu_backward",
                                 "silu_backward",
                                 "sigmoid_backward",
                                 "tanh_backward",
                                 "elu_backward",
                                 "leaky_relu_backward",
                                 "hardtanh_backward",
                                 "hardsigmoid_backward",
                                 "hardswish_backward",
                                 "softplus_backward",
                                 "mish_backward",
                                 "logit_backward",
                                 "softshrink_backward",
                                 "hardshrink_backward",
                                 "log_sigmoid_backward",
                                 "native_dropout_backward",
                                 "rsub",
                                 "special_entr",
                                 "special_erfcx",
                                 "special_ndtri",
                                 "special_xlog1py",
                                 "logaddexp",
                                 "logaddexp2",
                                 "erfcx",
                                 "real",
                                 "imag",
                                 "complex",
                                 "polar"};

// Of terms of a sum they give terms of the result.
constexpr auto kAdditive = {"add", "sub", "neg"};
constexpr auto kFactor = {"mul", "div"};

void add(RuleTable& table, const std::string& name, Plan (*plan)(const RuleCall&)) {
  table["aten::" + name] = {.plan = plan, .is_pointwise = true};
}

}  // namespace

void add_pointwise_rules(RuleTable& table) {
  for (const auto* name : kNonlinear) {
    add(table, name, &nonlinear);
    add(table, std::string(name) + "_", &nonlinear);
  }
  for (const auto* name : kNonlinearOnly) add(table, name, &nonlinear);
  for (const auto* name : kAdditive) {
    add(table, name, &additive);
    add(table, std::string(name) + "_", &additive);
  }
  for (const auto* name : kFactor) {
    add(table, name, &factor);
    add(table, std::string(name) + "_", &factor);
  }
  table["aten::masked_fill.Scalar"] = {.plan = &masked_fill, .is_pointwise = true};
  table["aten::masked_fill_.Scalar"] = {.plan = &masked_fill, .is_pointwise = true};
  // A number is added to one of the terms only, and what is rounded is no sum of rounded terms.
  for (const auto* name :
       {"add.Scalar", "add.Scalar_out", "sub.Scalar", "sub.Scalar_out", "div.Tensor_mode", "div_.Tensor_mode",
        "div.Scalar_mode", "div_.Scalar_mode", "div.out_mode", "div.Scalar_mode_out"}) {
    add(table, name, &nonlinear);
  }
  for (const auto* name : {"add_.Scalar", "sub_.Scalar"}) {
    add(table, name, &add_number);
  }
  table["aten::log_sigmoid_forward"] = {.plan = &log_sigmoid};
}

}  // namespace lockstep::detail
