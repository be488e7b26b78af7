// Layer, RMS and group norm: rows may be cut, what is normalised over is whole. Gradients of weight and bias are sums
// over rows, hence terms where rows are cut.
#include "lockstep/dtensor/rule.h"

namespace lockstep::detail {
namespace {

/// What is cut with the rows.
struct Rows {
  int64_t dims;                            // the first ones, that are not normalised over
  std::vector<std::size_t> cut_arguments;  // tensors with rows
  std::size_t cut_results;                 // the first ones have rows, the others are sums over them
};

Plan rows_plan(const RuleCall& call, const Rows& rows, std::vector<Sizes> result_sizes) {
  Plan plan;
  plan.result_sizes = std::move(result_sizes);
  plan.choices = [&call, rows, count = plan.result_sizes.size()](int64_t axis) {
    std::vector<bool> has_rows(call.operands().size(), false);
    for (const auto argument : rows.cut_arguments) has_rows[call.position_of(argument)] = true;
    const auto row_dim = [&](std::size_t operand, int64_t dim) {
      return has_rows[operand] && dim < rows.dims ? dim : int64_t{-1};
    };
    std::vector<Choice> choices;
    for (const auto& cut : cuts_on(call, axis, row_dim)) {
      auto choice = replicate_all(call, count);
      for (std::size_t i = 0; i < has_rows.size(); ++i) {
        if (has_rows[i]) choice.operands[i] = cut;
      }
      for (std::size_t i = 0; i < count; ++i) choice.results[i] = i < rows.cut_results ? cut : Placement(Partial());
      choices.push_back(std::move(choice));
    }
    choices.push_back(replicate_all(call, count));
    return choices;
  };
  return plan;
}

int64_t row_dims(const Operand& input, const c10::IValue& normalized_shape) {
  return input.dim() - static_cast<int64_t>(normalized_shape.toIntVector().size());
}

/// One number per row.
Sizes per_row(const Sizes& sizes, int64_t row_dims) {
  auto result = sizes;
  std::fill(result.begin() + row_dims, result.end(), 1);
  return result;
}

Plan layer_norm(const RuleCall& call) {
  const auto& input = *call.operand_of(0);
  const auto dims = row_dims(input, call.argument(1));
  const auto statistics = per_row(input.sizes(), dims);
  return rows_plan(call, {.dims = dims, .cut_arguments = {0}, .cut_results = 3},
                   {input.sizes(), statistics, statistics});
}

Plan layer_norm_backward(const RuleCall& call) {
  const auto& input = *call.operand_of(1);
  const auto weight = call.argument(2).toIntVector();
  return rows_plan(call, {.dims = row_dims(input, call.argument(2)), .cut_arguments = {0, 1, 3, 4}, .cut_results = 1},
                   {input.sizes(), weight, weight});
}

Plan rms_norm(const RuleCall& call) {
  const auto& input = *call.operand_of(0);
  const auto dims = row_dims(input, call.argument(1));
  return rows_plan(call, {.dims = dims, .cut_arguments = {0}, .cut_results = 2},
                   {input.sizes(), per_row(input.sizes(), dims)});
}

Plan rms_norm_backward(const RuleCall& call) {
  const auto& input = *call.operand_of(1);
  return rows_plan(call, {.dims = row_dims(input, call.argument(2)), .cut_arguments = {0, 1, 3}, .cut_results = 1},
                   {input.sizes(), call.argument(2).toIntVector()});
}

/// Samples may be cut; how many there are is an argument of its own.
void count_samples(Plan& plan, std::size_t input, std::size_t count) {
  plan.run = [input, count](LocalCall& local) {
    local.arguments[count] = local.arguments[input].toTensor().size(0);
    return local.run();
  };
}

Plan group_norm(const RuleCall& call) {
  const auto& input = *call.operand_of(0);
  const Sizes statistics = {call.argument(3).toInt(), call.argument(6).toInt()};
  auto plan =
      rows_plan(call, {.dims = 1, .cut_arguments = {0}, .cut_results = 3}, {input.sizes(), statistics, statistics});
  count_samples(plan, 0, 3);
  return plan;
}

Plan group_norm_backward(const RuleCall& call) {
  const auto& input = *call.operand_of(1);
  const Sizes weight = {call.argument(6).toInt()};
  auto plan =
      rows_plan(call, {.dims = 1, .cut_arguments = {0, 1, 2, 3}, .cut_results = 1}, {input.sizes(), weight, weight});
  count_samples(plan, 1, 5);
  return plan;
}

}  // namespace

void add_norm_rules(RuleTable& table) {
  table["aten::native_layer_norm."] = {.plan = &layer_norm};
  table["aten::native_layer_norm_backward."] = {.plan = &layer_norm_backward};
  table["aten::_fused_rms_norm."] = {.plan = &rms_norm};
  table["aten::_fused_rms_norm_backward."] = {.plan = &rms_norm_backward};
  table["aten::native_group_norm."] = {.plan = &group_norm};
  table["aten::native_group_norm_backward."] = {.plan = &group_norm_backward};
}

}  // namespace lockstep::detail
