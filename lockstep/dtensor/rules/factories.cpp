// new_zeros and its kin: tensors of any sizes made beside another one. Of its very sizes they are cut as it is, else
// they are whole on every rank.
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/tensor.h>

#include <algorithm>
#include <numeric>

#include "lockstep/dtensor/rule.h"

namespace lockstep::detail {
namespace {

Plan make_new(const RuleCall& call) {
  const auto& like = call.operands().front();
  Plan plan;
  plan.result_sizes = {call.argument(1).toIntVector()};
  plan.operand_placements = {like.layout->placements()};
  plan.result_placements = {plan.result_sizes.front() == like.sizes()
                                ? gradient_placements(like.layout->placements())
                                : Placements(like.layout->placements().size(), Replicate())};
  plan.sizes_argument = 1;
  return plan;
}

/// Autograd is about to write a gradient into a view of the new tensor. Any view is possible if it is whole.
bool is_for_written_view() {
  const auto node = torch::autograd::get_current_node();
  return node != nullptr && dynamic_cast<const torch::autograd::CopySlices*>(&*node) != nullptr;
}

/// Strides of a part have the order of those asked for.
Plan make_new_strided(const RuleCall& call) {
  auto plan = make_new(call);
  if (is_for_written_view()) {
    for (auto& each : plan.result_placements.front()) each = Replicate();
  }
  plan.result_strides = {call.argument(2).toIntVector()};
  plan.run = [](LocalCall& local) {
    const auto asked = local.arguments[2].toIntVector();
    const auto sizes = local.results.front()->local_sizes();
    std::vector<std::size_t> order(sizes.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return asked[a] < asked[b]; });
    auto strides = sizes;
    int64_t stride = 1;
    for (const auto dim : order) {
      strides[dim] = stride;
      stride *= std::max<int64_t>(sizes[dim], 1);
    }
    local.arguments[2] = strides;
    return local.run();
  };
  return plan;
}

}  // namespace

void add_factory_rules(RuleTable& table) {
  for (const auto* name : {"aten::new_zeros.", "aten::new_ones.", "aten::new_full.", "aten::new_empty."}) {
    table[name] = {.plan = &make_new};
  }
  table["aten::new_empty_strided."] = {.plan = &make_new_strided};
}

}  // namespace lockstep::detail
