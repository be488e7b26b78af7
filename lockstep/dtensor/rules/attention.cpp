// Attention in one operator, as libtorch's scaled_dot_product_attention() chooses it: cut by batch or by heads, where
// every rank attends on its own; whole otherwise.
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <string>

#include "lockstep/dtensor/rule.h"

namespace lockstep::detail {
namespace {

const std::string& argument_name(const RuleCall& call, const Operand& operand) {
  return call.op().schema().arguments()[operand.argument].name();
}

bool is_mask(const RuleCall& call, const Operand& operand) {
  return argument_name(call, operand) == "attn_mask" || argument_name(call, operand) == "attn_bias";
}

/// Has batch and heads in front: query, key, value, what comes of them, and their gradients.
bool has_heads(const RuleCall& call, const Operand& operand) {
  const auto& name = argument_name(call, operand);
  return name.starts_with("grad_out") || name == "query" || name == "key" || name == "value" || name == "out" ||
         name == "logsumexp";
}

const Operand& operand_named(const RuleCall& call, const char* name) {
  const auto found = std::find_if(call.operands().begin(), call.operands().end(),
                                  [&](const auto& each) { return argument_name(call, each) == name; });
  TORCH_INTERNAL_ASSERT(found != call.operands().end());
  return *found;
}

/// Whether all that has batch and heads has as many as the query: else a part of one does not belong to a part of the
/// other.
bool all_have_it(const RuleCall& call, int64_t dim) {
  const auto size = operand_named(call, "query").sizes()[static_cast<std::size_t>(dim)];
  return std::all_of(call.operands().begin(), call.operands().end(), [&](const Operand& operand) {
    return !has_heads(call, operand) || operand.sizes()[static_cast<std::size_t>(dim)] == size;
  });
}

/// A mask that is the same for all of `dim` is whole on every rank.
Placement mask_placement(const RuleCall& call, const Operand& mask, const Placement& cut) {
  const auto dim = *sharded_dim(cut) - operand_named(call, "query").dim() + mask.dim();
  if (dim < 0 || mask.sizes()[static_cast<std::size_t>(dim)] == 1) return Replicate();
  return cut_of(cut, dim);
}

/// Ways of an axis, with as many results as there are of batch and heads.
std::vector<Choice> attention_choices(const RuleCall& call, int64_t axis, std::size_t results) {
  const auto with_heads = [&](std::size_t i, int64_t dim) {
    return has_heads(call, call.operands()[i]) && dim < 2 && all_have_it(call, dim) ? dim : int64_t{-1};
  };
  std::vector<Choice> choices;
  for (const auto& cut : cuts_on(call, axis, with_heads)) {
    Choice choice{.operands = {}, .results = Placements(results, cut)};
    for (const auto& operand : call.operands()) {
      choice.operands.push_back(has_heads(call, operand) ? cut
                                : is_mask(call, operand) ? mask_placement(call, operand, cut)
                                                         : Placement(Replicate()));
    }
    choices.push_back(std::move(choice));
  }
  choices.push_back(replicate_all(call, results));
  return choices;
}

void check_no_dropout(const RuleCall& call) {
  const auto& arguments = call.op().schema().arguments();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    TORCH_CHECK(arguments[i].name() != "dropout_p" || call.argument(i).toDouble() == 0, call.describe(),
                ": attention with dropout has no rule for DTensors. Set dropout_p to 0, or use to_local().");
  }
}

std::size_t tensors_returned(const RuleCall& call) {
  const auto& returns = call.op().schema().returns();
  return static_cast<std::size_t>(std::count_if(returns.begin(), returns.end(), [](const auto& each) {
    return each.type()->kind() == c10::TypeKind::TensorType;
  }));
}

/// Kernels divide by the number of heads. A rank that has none has no results either.
bool has_no_part(const LocalCall& local) {
  const auto position = local.call.position_of(operand_named(local.call, "query").argument);
  const auto sizes = local.operands[position]->local_sizes();
  return std::find(sizes.begin(), sizes.end(), 0) != sizes.end();
}

torch::jit::Stack no_part(const LocalCall& local) {
  torch::jit::Stack results;
  const auto options = operand_named(local.call, "query").tensor.options().requires_grad(false);
  std::size_t next = 0;
  for (const auto& each : local.call.op().schema().returns()) {
    if (each.type()->kind() == c10::TypeKind::TensorType) {
      results.emplace_back(at::zeros(local.results[next++]->local_sizes(), options));
    } else {
      results.emplace_back(int64_t{0});
    }
  }
  return results;
}

/// Sizes beyond batch and heads are the kernel's own, as are those of what it keeps for its backward pass.
torch::jit::Stack run_attention(LocalCall& local) {
  if (has_no_part(local)) return no_part(local);
  auto results = local.run();
  std::size_t next = 0;
  for (const auto& result : results) {
    if (!result.isTensor()) continue;
    auto& layout = local.results[next++];
    if (next == 1 || !result.toTensor().defined()) continue;
    auto sizes = result.toTensor().sizes().vec();
    if (next == 2) std::copy_n(layout->sizes().begin(), 2, sizes.begin());
    layout = std::make_shared<const Layout>(layout->mesh(), layout->placements(), std::move(sizes));
  }
  return results;
}

Plan attention_forward(const RuleCall& call) {
  check_no_dropout(call);
  const auto& query = operand_named(call, "query").sizes();
  auto output = query;
  output.back() = operand_named(call, "value").sizes().back();
  Plan plan;
  plan.result_sizes = {output, Sizes(query.begin(), query.end() - 1)};
  plan.result_sizes.resize(tensors_returned(call));
  plan.choices = [&call](int64_t axis) {
    auto choices = attention_choices(call, axis, 2);
    for (auto& choice : choices) choice.results.resize(tensors_returned(call), Replicate());
    return choices;
  };
  plan.run = &run_attention;
  return plan;
}

Plan attention_backward(const RuleCall& call) {
  check_no_dropout(call);
  Plan plan;
  for (const auto* name : {"query", "key", "value"}) plan.result_sizes.push_back(operand_named(call, name).sizes());
  const auto& operands = call.operands();
  const auto mask =
      std::find_if(operands.begin(), operands.end(), [&](const auto& each) { return is_mask(call, each); });
  const bool returns_fourth = tensors_returned(call) == 4;
  if (returns_fourth) plan.result_sizes.push_back(mask != operands.end() ? mask->sizes() : Sizes());
  plan.choices = [&call, mask, returns_fourth](int64_t axis) {
    auto choices = attention_choices(call, axis, 3);
    for (auto& choice : choices) {
      if (!returns_fourth) continue;
      Placement of_mask = Replicate();
      if (mask != call.operands().end())
        of_mask = choice.operands[static_cast<std::size_t>(mask - call.operands().begin())];
      const bool is_whole = std::holds_alternative<Replicate>(of_mask) && is_cut(choice.results.front());
      choice.results.push_back(is_whole ? Placement(Partial()) : of_mask);
    }
    return choices;
  };
  plan.run = [](LocalCall& local) { return has_no_part(local) ? no_part(local) : local.run(); };
  return plan;
}

}  // namespace

void add_attention_rules(RuleTable& table) {
  for (const auto* kind : {"flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention"}) {
    const auto name = std::string("aten::_scaled_dot_product_") + kind;
    table[name + "."] = {.plan = &attention_forward};
    table[name + "_backward."] = {.plan = &attention_backward};
  }
}

}  // namespace lockstep::detail
