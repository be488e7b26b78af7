// Optimizers' fused kernels: lists of parameters, gradients and states. Each rank updates what it holds of the
// parameters; whatever belongs to one is brought to its placements.
#include "lockstep/dtensor/rule.h"

namespace lockstep::detail {
namespace {

constexpr std::size_t kParameters = 0;
constexpr std::size_t kGradients = 1;

void check_parameter(const RuleCall& call, const Operand& parameter) {
  TORCH_CHECK(!parameter.layout->has_partial(), call.describe(),
              ": terms of a sum cannot be updated one by one. Use redistribute() first.");
}

/// Kernels write gradients only to unscale them.
bool writes_gradients(const RuleCall& call) {
  const auto& arguments = call.op().schema().arguments();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() == "grad_scale") return !call.argument(i).isNone();
  }
  return false;
}

Plan fused_update(const RuleCall& call) {
  Plan plan;
  const Placements whole(static_cast<std::size_t>(call.mesh().ndim()), Replicate());
  std::size_t argument = kParameters;
  std::size_t index = 0;
  for (const auto& operand : call.operands()) {
    index = operand.argument == argument ? index : 0;
    argument = operand.argument;
    const auto& parameter = call.operands()[index++];
    if (argument == kParameters) check_parameter(call, operand);
    // Of other sizes are numbers: steps, a learning rate.
    const bool belongs = parameter.argument == kParameters && parameter.sizes() == operand.sizes();
    plan.operand_placements.push_back(belongs ? parameter.layout->placements() : whole);
  }
  if (!writes_gradients(call)) plan.only_read = kGradients;
  return plan;
}

}  // namespace

void add_optimizer_rules(RuleTable& table) {
  for (const auto* name : {"aten::_fused_adam_", "aten::_fused_adamw_", "aten::_fused_sgd_", "aten::_fused_adagrad_"}) {
    table[name] = {.plan = &fused_update};
  }
}

}  // namespace lockstep::detail
