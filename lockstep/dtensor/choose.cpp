#include "lockstep/dtensor/choose.h"

#include <algorithm>
#include <limits>

namespace lockstep::detail {
namespace {

constexpr double kImpossible = std::numeric_limits<double>::infinity();
// What moves nothing still costs a copy: it wins against what moves bytes, and loses against nothing at all.
constexpr double kCopy = 1.0;
// Values that are made whole to be made terms again: where nothing else keeps what is written in place.
constexpr double kLastResort = 1e30;

/// Bytes that come and go for one tensor of `bytes`, on an axis of `ranks`.
double cost(const Placement& from, const Placement& to, double bytes, double ranks) {
  if (from == to || ranks == 1) return 0;
  const double others = (ranks - 1) / ranks;
  if (is_partial(to)) {
    if (!is_linear_partial(to)) return kImpossible;
    return std::holds_alternative<Replicate>(from) ? kCopy : kLastResort;
  }
  if (is_partial(from)) return kCopy + bytes * others * (is_cut(to) ? 1 : 2);
  if (std::holds_alternative<Replicate>(from)) return kCopy;
  if (!is_cut(to)) return kCopy + bytes * others;
  // From one cut to another: its own part of its own part stays; other cuts than Shard go through the whole tensor.
  const bool is_plain = std::holds_alternative<Shard>(from) && std::holds_alternative<Shard>(to);
  return kCopy + bytes * others / (is_plain ? ranks : 1);
}

/// Of what the ranks of `axis` hold together.
double bytes_of(const Operand& operand, int64_t axis) {
  auto bytes = static_cast<double>(operand.layout->numel()) * static_cast<double>(operand.tensor.element_size());
  const auto& mesh = operand.layout->mesh();
  for (int64_t other = 0; other < mesh.ndim(); ++other) {
    if (other != axis && is_cut(operand.on(other))) bytes /= static_cast<double>(mesh.size(other));
  }
  return bytes;
}

/// What is written keeps its placement, and the result that it becomes has that one too. What is written without being
/// read has no say in how the result comes about.
bool keeps_what_is_written(const RuleCall& call, Choice& choice, int64_t axis) {
  std::size_t result = 0;
  for (std::size_t i = 0; i < call.operands().size(); ++i) {
    const auto& operand = call.operands()[i];
    if (!operand.is_written) continue;
    const bool is_returned = result < choice.results.size();
    if (operand.is_out && is_returned) choice.operands[i] = choice.results[result];
    if (!(choice.operands[i] == operand.on(axis))) return false;
    if (is_returned && !(choice.results[result] == operand.on(axis))) return false;
    ++result;
  }
  return true;
}

/// Whether a tensor with the placements `begun` on the axes before may have `next`: see Layout.
bool fits(const Placements& begun, const Placement& next) {
  return std::all_of(begun.begin(), begun.end(), [&](const Placement& each) {
    if (is_partial(each) && is_partial(next)) {
      return each == next || (is_linear_partial(each) && is_linear_partial(next));
    }
    const bool is_ragged = std::holds_alternative<RaggedShard>(each) || std::holds_alternative<RaggedShard>(next);
    return !is_ragged || !is_cut(each) || sharded_dim(each) != sharded_dim(next);
  });
}

bool fits(const Chosen& begun, const Choice& choice) {
  for (std::size_t i = 0; i < choice.operands.size(); ++i) {
    if (!fits(begun.operands[i], choice.operands[i])) return false;
  }
  for (std::size_t i = 0; i < choice.results.size(); ++i) {
    if (!fits(begun.results[i], choice.results[i])) return false;
  }
  return true;
}

double cost_of(const RuleCall& call, const Choice& choice, int64_t axis) {
  double sum = 0;
  const auto ranks = static_cast<double>(call.mesh().size(axis));
  for (std::size_t i = 0; i < call.operands().size(); ++i) {
    const auto& operand = call.operands()[i];
    sum += cost(operand.on(axis), choice.operands[i], bytes_of(operand, axis), ranks);
  }
  return sum;
}

[[noreturn]] void refuse(const RuleCall& call, int64_t axis) {
  const bool writes =
      std::any_of(call.operands().begin(), call.operands().end(), [](const auto& each) { return each.is_written; });
  TORCH_CHECK(
      false, call.describe(), " cannot be done ", writes ? "in place " : "", "on mesh dim ", axis,
      " with these placements. ",
      writes ? "Use the form that returns a new tensor, or redistribute() first." : "Use redistribute() first.");
}

}  // namespace

Chosen choose(const RuleCall& call, const Plan& plan) {
  if (!plan.operand_placements.empty()) {
    for (std::size_t i = 0; i < call.operands().size(); ++i) {
      const auto& operand = call.operands()[i];
      const bool is_written = operand.is_written && plan.only_read != operand.argument;
      TORCH_CHECK(!is_written || plan.operand_placements[i] == operand.layout->placements(), call.describe(),
                  " cannot be done in place with these placements: it needs ", to_string(plan.operand_placements[i]),
                  ". Use the form that returns a new tensor, or redistribute() first.");
    }
    return {plan.operand_placements, plan.result_placements};
  }
  Chosen chosen{.operands = std::vector<Placements>(call.operands().size()),
                .results = std::vector<Placements>(plan.result_sizes.size())};
  for (int64_t axis = 0; axis < call.mesh().ndim(); ++axis) {
    auto choices = plan.choices(axis);
    const Choice* best = nullptr;
    double least = kImpossible;
    for (auto& choice : choices) {
      if (!keeps_what_is_written(call, choice, axis) || !fits(chosen, choice)) continue;
      const auto its = cost_of(call, choice, axis);
      if (its >= least) continue;
      least = its;
      best = &choice;
    }
    if (best == nullptr) refuse(call, axis);
    for (std::size_t i = 0; i < best->operands.size(); ++i) chosen.operands[i].push_back(best->operands[i]);
    for (std::size_t i = 0; i < best->results.size(); ++i) chosen.results[i].push_back(best->results[i]);
  }
  return chosen;
}

}  // namespace lockstep::detail
