// Losses that compare element by element and then reduce: each rank sums up its part, and an average divides by the
// number of all elements.
#include <c10/util/accumulate.h>

#include <algorithm>

#include "lockstep/dtensor/rule.h"

namespace lockstep::detail {
namespace {

std::size_t element_reduction(const RuleCall& call) {
  const auto& arguments = call.op().schema().arguments();
  const auto found =
      std::find_if(arguments.begin(), arguments.end(), [](const auto& each) { return each.name() == "reduction"; });
  TORCH_INTERNAL_ASSERT(found != arguments.end());
  return static_cast<std::size_t>(found - arguments.begin());
}

/// Runs with a sum for an average, and divides by the elements of the whole.
torch::jit::Stack run_element_loss(LocalCall& local, int64_t elements) {
  auto& reduction = local.arguments[element_reduction(local.call)];
  const bool is_average = reduction.toInt() == at::Reduction::Mean;
  if (is_average) reduction = static_cast<int64_t>(at::Reduction::Sum);
  auto results = local.run();
  if (is_average) results.front() = results.front().toTensor() / elements;
  return results;
}

Plan element_loss(const RuleCall& call) {
  auto plan = pointwise_plan(call, Linearity::kNone);
  if (call.argument(element_reduction(call)).toInt() == at::Reduction::None) return plan;
  const auto elements = c10::multiply_integers(plan.result_sizes.front());
  plan.result_sizes = {Sizes()};
  plan.choices = [by_element = plan.choices](int64_t axis) {
    auto choices = by_element(axis);
    for (auto& each : choices) {
      if (is_cut(each.results.front())) each.results.front() = Partial();
    }
    return choices;
  };
  plan.run = [elements](LocalCall& local) { return run_element_loss(local, elements); };
  return plan;
}

/// Of the loss's gradient, the input and the target.
Plan element_loss_backward(const RuleCall& call) {
  auto plan = pointwise_plan(call, Linearity::kNone);
  const auto elements = c10::multiply_integers(plan.result_sizes.front());
  plan.run = [elements](LocalCall& local) { return run_element_loss(local, elements); };
  return plan;
}

}  // namespace

void add_element_loss_rules(RuleTable& table) {
  for (const auto* name :
       {"mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits"}) {
    table[std::string("aten::") + name] = {.plan = &element_loss};
    table[std::string("aten::") + name + "_backward"] = {.plan = &element_loss_backward};
  }
}

}  // namespace lockstep::detail
