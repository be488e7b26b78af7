// Embedding. A table cut by columns gives columns; cut by rows each rank looks up the ids it has, and the others' give
// zero rows: terms of a sum. Ids may be cut as they like where the table is whole.
#include <ATen/ops/embedding.h>
#include <ATen/ops/zeros.h>

#include "lockstep/dtensor/rule.h"
#include "lockstep/dtensor/rules/positions.h"

namespace lockstep::detail {
namespace {

Sizes with_columns(Sizes sizes, int64_t columns) {
  sizes.push_back(columns);
  return sizes;
}

bool cuts_rows(const Layout& table) {
  for (const auto& each : table.placements()) {
    if (sharded_dim(each) == 0) return true;
  }
  return false;
}

torch::jit::Stack look_up(LocalCall& local) {
  const auto& layout = *local.operands.front();
  if (!cuts_rows(layout)) return local.run();
  const auto table = local.arguments[0].toTensor();
  const auto ids = local.arguments[1].toTensor();
  if (ids.is_cpu() && ids.numel() > 0) {
    // One device refuses it too; masks would make zeros of it in silence.
    TORCH_CHECK_INDEX(ids.min().item<int64_t>() >= 0 && ids.max().item<int64_t>() < layout.sizes()[0],
                      local.call.describe(), ": an id is outside of the table.");
  }
  if (table.size(0) == 0) return {at::zeros(with_columns(ids.sizes().vec(), table.size(1)), table.options())};
  const auto [positions, is_other] = positions_in_part(ids, layout, 0);
  auto rows = at::embedding(table, positions);
  rows.masked_fill_(is_other.unsqueeze(-1), 0);
  return {rows};
}

Plan embedding(const RuleCall& call) {
  const auto& table = call.operands().at(0);
  const auto& ids = call.operands().at(1);
  Plan plan;
  plan.result_sizes = {with_columns(ids.sizes(), table.sizes()[1])};
  plan.choices = [&table, &ids](int64_t axis) {
    std::vector<Choice> choices;
    const auto& rows = table.on(axis);
    if (const auto dim = sharded_dim(rows)) {
      choices.push_back(
          {.operands = {rows, Replicate()}, .results = {*dim == 1 ? cut_of(rows, ids.dim()) : Placement(Partial())}});
    }
    if (is_cut(ids.on(axis))) choices.push_back({.operands = {Replicate(), ids.on(axis)}, .results = {ids.on(axis)}});
    choices.push_back({.operands = {Replicate(), Replicate()}, .results = {Replicate()}});
    return choices;
  };
  plan.run = &look_up;
  return plan;
}

Plan embedding_backward(const RuleCall& call) {
  const auto& gradient = call.operands().at(0);
  const auto& ids = call.operands().at(1);
  // Counts of ids are those of all ranks.
  const bool needs_all_ids = call.argument(4).toBool();
  Plan plan;
  plan.result_sizes = {{call.argument(2).toInt(), gradient.sizes().back()}};
  plan.choices = [&call, &gradient, &ids, needs_all_ids](int64_t axis) {
    std::vector<Choice> choices;
    const auto& held = gradient.on(axis);
    if (sharded_dim(held) == ids.dim()) {
      choices.push_back({.operands = {held, Replicate()}, .results = {cut_of(held, 1)}});
    }
    if (is_linear_partial(held)) choices.push_back({.operands = {held, Replicate()}, .results = {held}});
    const auto id_dim = [&](std::size_t, int64_t dim) { return dim < ids.dim() && !needs_all_ids ? dim : int64_t{-1}; };
    for (const auto& cut : cuts_on(call, axis, id_dim)) {
      choices.push_back({.operands = {cut, cut}, .results = {Partial()}});
    }
    choices.push_back({.operands = {Replicate(), Replicate()}, .results = {Replicate()}});
    return choices;
  };
  return plan;
}

}  // namespace

void add_embedding_rules(RuleTable& table) {
  table["aten::embedding."] = {.plan = &embedding};
  table["aten::embedding_dense_backward."] = {.plan = &embedding_backward};
}

}  // namespace lockstep::detail
