// Operators that take or add elements by index. Cuts of dims that are not indexed stay; indices are whole, except where
// they may be cut as the result is.
#include <ATen/ops/gather.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "lockstep/dtensor/rule.h"
#include "lockstep/dtensor/rules/positions.h"

namespace lockstep::detail {
namespace {

int64_t indexed_dim(const RuleCall& call) {
  return RuleCall::dim_from_front(call.argument(1).toInt(), call.operands().front().dim());
}

Plan index_select(const RuleCall& call) {
  const auto& from = call.operands().at(0);
  const auto& index = call.operands().at(1);
  const auto dim = indexed_dim(call);
  Plan plan;
  auto sizes = from.sizes();
  if (!sizes.empty()) sizes[static_cast<std::size_t>(dim)] = index.layout->numel();
  plan.result_sizes = {std::move(sizes)};
  plan.choices = [&from, &index, dim](int64_t axis) {
    std::vector<Choice> choices;
    const auto& held = from.on(axis);
    const auto cut = sharded_dim(held);
    const bool stays = (cut && *cut != dim) || is_linear_partial(held);
    if (stays) choices.push_back({.operands = {held, Replicate()}, .results = {held}});
    if (is_cut(index.on(axis)) && from.dim() > 0) {
      choices.push_back({.operands = {Replicate(), index.on(axis)}, .results = {cut_of(index.on(axis), dim)}});
    }
    choices.push_back({.operands = {Replicate(), Replicate()}, .results = {Replicate()}});
    return choices;
  };
  return plan;
}

bool cuts_dim(const Layout& layout, int64_t dim) {
  return std::any_of(layout.placements().begin(), layout.placements().end(),
                     [&](const Placement& each) { return sharded_dim(each) == dim; });
}

/// Others' elements are zero.
torch::jit::Stack gather_from_part(LocalCall& local, int64_t dim) {
  const auto& layout = *local.operands.front();
  if (!cuts_dim(layout, dim)) return local.run();
  const auto part = local.arguments[0].toTensor();
  const auto index = local.arguments[2].toTensor();
  if (index.is_cpu() && index.numel() > 0) {
    TORCH_CHECK_INDEX(
        index.min().item<int64_t>() >= 0 && index.max().item<int64_t>() < layout.sizes()[static_cast<std::size_t>(dim)],
        local.call.describe(), ": an index is outside of the tensor.");
  }
  if (part.numel() == 0) return {at::zeros(index.sizes(), part.options())};
  const auto [positions, is_other] = positions_in_part(index, layout, dim);
  auto taken = at::gather(part, dim, positions);
  taken.masked_fill_(is_other, 0);
  return {taken};
}

Plan gather(const RuleCall& call) {
  const auto& from = call.operands().at(0);
  const auto& index = call.operands().at(1);
  const auto dim = indexed_dim(call);
  Plan plan;
  plan.result_sizes = {index.sizes()};
  plan.choices = [&call, &from, &index, dim](int64_t axis) {
    std::vector<Choice> choices;
    const bool is_scalar = from.dim() == 0 || index.dim() == 0;
    // Index i of another dim stands for index i of the tensor: equally long, they are cut at the same places.
    const auto same_dim = [&](std::size_t, int64_t each) {
      const auto at = static_cast<std::size_t>(each);
      return !is_scalar && each != dim && from.sizes()[at] == index.sizes()[at] ? each : int64_t{-1};
    };
    for (const auto& cut : cuts_on(call, axis, same_dim)) {
      choices.push_back({.operands = {cut, cut}, .results = {cut}});
    }
    const auto& held = from.on(axis);
    if (!is_scalar && sharded_dim(held) == dim) {
      choices.push_back({.operands = {held, Replicate()}, .results = {Partial()}});
    }
    if (is_linear_partial(held)) choices.push_back({.operands = {held, Replicate()}, .results = {held}});
    if (!is_scalar && sharded_dim(index.on(axis)) == dim) {
      choices.push_back({.operands = {Replicate(), index.on(axis)}, .results = {index.on(axis)}});
    }
    choices.push_back(replicate_all(call));
    return choices;
  };
  plan.run = [dim](LocalCall& local) { return gather_from_part(local, dim); };
  return plan;
}

/// scatter, scatter_add: all operands cut alike in a dim that is not indexed, where they are equally long.
Plan scatter(const RuleCall& call) {
  Plan plan;
  plan.result_sizes = {call.operands().front().sizes()};
  plan.choices = [&call, dim = indexed_dim(call)](int64_t axis) {
    const auto& operands = call.operands();
    const auto same_dim = [&](std::size_t, int64_t each) {
      const auto at = static_cast<std::size_t>(each);
      const bool is_same = each != dim && std::all_of(operands.begin(), operands.end(), [&](const Operand& operand) {
                             return operand.dim() == 0 || (at < operand.sizes().size() &&
                                                           operand.sizes()[at] == operands.front().sizes()[at]);
                           });
      return is_same ? each : int64_t{-1};
    };
    std::vector<Choice> choices;
    for (const auto& cut : cuts_on(call, axis, same_dim)) {
      auto choice = replicate_all(call);
      for (std::size_t i = 0; i < operands.size(); ++i) {
        if (operands[i].dim() > 0) choice.operands[i] = cut;
      }
      choice.results = {cut};
      choices.push_back(std::move(choice));
    }
    choices.push_back(replicate_all(call));
    return choices;
  };
  return plan;
}

/// index_add, index_copy: into, dim, index, source.
Plan index_add(const RuleCall& call) {
  Plan plan;
  plan.result_sizes = {call.operands().front().sizes()};
  plan.choices = [&call, dim = indexed_dim(call)](int64_t axis) {
    const auto other_dim = [&](std::size_t operand, int64_t each) {
      return operand != 1 && each != dim && call.operands()[operand].dim() == call.operands().front().dim()
                 ? each
                 : int64_t{-1};
    };
    std::vector<Choice> choices;
    for (const auto& cut : cuts_on(call, axis, other_dim)) {
      choices.push_back({.operands = {cut, Replicate(), cut}, .results = {cut}});
    }
    choices.push_back(replicate_all(call));
    return choices;
  };
  return plan;
}

/// Which dims a list of indices, whose absent ones stand for whole dims, takes elements of.
struct IndexList {
  std::vector<bool> is_indexed;  // by dim
  Sizes broadcast;               // sizes of all indices together
  int64_t first = 0;             // where they stand in the result
};

IndexList index_list_of(const RuleCall& call) {
  const auto& from = call.operands().front();
  IndexList list{.is_indexed = std::vector<bool>(from.sizes().size(), false), .broadcast = {}};
  std::size_t dim = 0;
  std::size_t next = 1;
  for (const std::optional<at::Tensor>& each : call.argument(1).toOptionalTensorList()) {
    if (each && each->defined()) {
      const auto& index = call.operands()[next++];
      TORCH_CHECK(index.tensor.scalar_type() != at::kBool && index.tensor.scalar_type() != at::kByte, call.describe(),
                  ": how many elements a mask takes is not known before. Use where() or masked_fill(), or to_local().");
      list.is_indexed.at(dim) = true;
      list.broadcast = at::infer_size(list.broadcast, index.sizes());
    }
    ++dim;
  }
  const auto begin = std::find(list.is_indexed.begin(), list.is_indexed.end(), true);
  const auto end = std::find(list.is_indexed.rbegin(), list.is_indexed.rend(), true).base();
  // Indices with a whole dim between them come first in the result.
  const bool is_one_run = std::find(begin, end, false) == end;
  list.first = is_one_run ? begin - list.is_indexed.begin() : 0;
  return list;
}

/// Where a dim that is not indexed lies in what is taken.
int64_t dim_of_taken(const IndexList& list, int64_t dim) {
  const auto whole = std::count(list.is_indexed.begin(), list.is_indexed.begin() + dim, false);
  return whole < list.first ? whole : whole + static_cast<int64_t>(list.broadcast.size());
}

Sizes sizes_of_taken(const IndexList& list, const Sizes& from) {
  Sizes sizes;
  for (std::size_t dim = 0; dim < from.size(); ++dim) {
    if (!list.is_indexed[dim]) sizes.push_back(from[dim]);
  }
  sizes.insert(sizes.begin() + list.first, list.broadcast.begin(), list.broadcast.end());
  return sizes;
}

Plan index(const RuleCall& call) {
  const auto list = index_list_of(call);
  const auto& from = call.operands().front();
  Plan plan;
  plan.result_sizes = {sizes_of_taken(list, from.sizes())};
  plan.choices = [&call, &from, list](int64_t axis) {
    std::vector<Choice> choices;
    const auto& held = from.on(axis);
    const auto dim = sharded_dim(held);
    const bool stays = dim && !list.is_indexed[static_cast<std::size_t>(*dim)];
    if (stays || is_linear_partial(held)) {
      auto choice = replicate_all(call);
      choice.operands.front() = held;
      choice.results = {stays ? cut_of(held, dim_of_taken(list, *dim)) : held};
      choices.push_back(std::move(choice));
    }
    choices.push_back(replicate_all(call));
    return choices;
  };
  return plan;
}

/// Into a tensor that is cut in dims which are not indexed, from values cut alike.
Plan index_put(const RuleCall& call) {
  const auto list = index_list_of(call);
  const auto values_at = call.position_of(2);
  Plan plan;
  plan.result_sizes = {call.operands().front().sizes()};
  plan.choices = [&call, list, values_at](int64_t axis) {
    const auto& into = call.operands().front();
    const auto& values = call.operands()[values_at];
    const auto sizes = sizes_of_taken(list, into.sizes());
    const auto dim = sharded_dim(into.on(axis));
    std::vector<Choice> choices;
    if (dim && !list.is_indexed[static_cast<std::size_t>(*dim)]) {
      auto choice = replicate_all(call);
      choice.operands.front() = into.on(axis);
      choice.results = {into.on(axis)};
      const auto in_values = dim_of_taken(list, *dim) - static_cast<int64_t>(sizes.size()) + values.dim();
      const bool is_repeated = in_values < 0 || values.sizes()[static_cast<std::size_t>(in_values)] == 1;
      if (!is_repeated) choice.operands[values_at] = cut_of(into.on(axis), in_values);
      choices.push_back(std::move(choice));
    }
    choices.push_back(replicate_all(call));
    return choices;
  };
  return plan;
}

}  // namespace

void add_index_rules(RuleTable& table) {
  table["aten::index_select."] = {.plan = &index_select};
  table["aten::gather."] = {.plan = &gather};
  for (const auto* name : {"aten::scatter.src", "aten::scatter.value", "aten::scatter_.src", "aten::scatter_.value",
                           "aten::scatter_add.", "aten::scatter_add_."}) {
    table[name] = {.plan = &scatter};
  }
  for (const auto* name : {"aten::index_add.", "aten::index_add_.", "aten::index_copy.", "aten::index_copy_."}) {
    table[name] = {.plan = &index_add};
  }
  table["aten::index.Tensor"] = {.plan = &index};
  for (const auto* name : {"aten::index_put.", "aten::index_put_.", "aten::_index_put_impl_."}) {
    table[name] = {.plan = &index_put};
  }
}

}  // namespace lockstep::detail
