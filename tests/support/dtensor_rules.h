// Operators on DTensors against one device: every placement of every input, forward and backward.
#pragma once

#include <functional>
#include <random>

#include "lockstep/base/str.h"
#include "lockstep/dtensor/dtensor.h"
#include "lockstep/testing/gtest.h"

namespace lockstep::testing {

using Tensors = std::vector<at::Tensor>;

struct RuleCase {
  std::string name;
  Tensors inputs;  // whole ones; those of floating point are differentiated
  std::function<Tensors(const Tensors&)> run;
  bool has_gradient = true;
};

inline at::Tensor normal(at::IntArrayRef sizes, uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randn(sizes, generator, at::kDouble);
}

inline at::Tensor integers(int64_t high, at::IntArrayRef sizes, uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randint(high, sizes, generator, at::kLong);
}

/// What the `index`-th of `count` ranks holds of a value that they hold terms of.
inline at::Tensor term_of(const at::Tensor& value, ReduceOp op, int index, int64_t count) {
  const auto noise = at::arange(value.numel(), value.options()).view(value.sizes()).add(1).sin();
  if (op == ReduceOp::SUM) return index == 0 ? value - noise * (count - 1) : noise;
  if (op == ReduceOp::AVG) return value + noise * (2 * index - (count - 1));
  return index == count - 1 ? value : value - noise.abs();  // max
}

inline at::Tensor local_of(const at::Tensor& whole, const Layout& layout) {
  const auto& mesh = layout.mesh();
  auto value = whole;
  for (int64_t axis = 0; axis < mesh.ndim(); ++axis) {
    const auto* partial = std::get_if<Partial>(&layout.placements()[static_cast<std::size_t>(axis)]);
    if (partial == nullptr) continue;
    value = term_of(value, partial->op, (*mesh.get_coordinate())[static_cast<std::size_t>(axis)], mesh.size(axis));
  }
  return layout.cut(value).contiguous().clone();
}

/// All that an axis may do to the tensor.
inline Placements axis_placements(const at::Tensor& tensor) {
  Placements all = {Replicate()};
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) all.emplace_back(Shard(dim));
  if (tensor.dim() > 0) all.emplace_back(StridedShard(0, 2));
  if (!tensor.is_floating_point()) return all;
  for (const auto op : {ReduceOp::SUM, ReduceOp::AVG, ReduceOp::MAX}) all.emplace_back(Partial(op));
  return all;
}

inline at::Tensor weighted(const Tensors& outputs, const std::function<at::Tensor(const at::Tensor&)>& constant) {
  at::Tensor loss;
  uint64_t seed = 100;
  for (const auto& output : outputs) {
    ++seed;
    if (!output.requires_grad()) continue;
    const auto term = (output * constant(normal(output.sizes(), seed).to(output.scalar_type()))).sum();
    loss = loss.defined() ? loss + term : term;
  }
  return loss;
}

inline void check_close(const std::string& what, const at::Tensor& actual, const at::Tensor& expected) {
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  ASSERT_EQ(actual.scalar_type(), expected.scalar_type()) << what;
  EXPECT_TRUE(at::allclose(actual, expected, 1e-6, 1e-8, /*equal_nan=*/true)) << what << "\n"
                                                                              << actual << "\nexpected\n"
                                                                              << expected;
}

/// One assignment of placements to all inputs.
inline void check_assignment(const DeviceMesh& mesh, const RuleCase& rule, const std::vector<Placements>& placements) {
  std::string what = rule.name;
  for (const auto& each : placements) what += " " + to_string(each);
  Tensors leaves;
  Tensors locals;
  Tensors distributed;
  for (std::size_t i = 0; i < rule.inputs.size(); ++i) {
    const auto& input = rule.inputs[i];
    const Layout layout(mesh, placements[i], input.sizes().vec());
    const bool has_gradient = rule.has_gradient && input.is_floating_point();
    leaves.push_back(input.detach().clone().requires_grad_(has_gradient));
    locals.push_back(local_of(input, layout).requires_grad_(has_gradient));
    distributed.push_back(
        DTensor::from_local(locals.back(), mesh, placements[i],
                            {.shape = input.sizes().vec(), .stride = input.contiguous().strides().vec()}));
  }
  const auto expected = rule.run(leaves);
  const auto outputs = rule.run(distributed);
  ASSERT_EQ(outputs.size(), expected.size());
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    ASSERT_TRUE(is_dtensor(outputs[i])) << what;
    const at::NoGradGuard no_grad;
    const DTensor output(outputs[i].detach());
    EXPECT_EQ(output.to_local().sizes(), at::IntArrayRef(output.layout().local_sizes())) << what;
    EXPECT_EQ(outputs[i].sizes(), expected[i].sizes()) << what;
    check_close(str(what, ": output ", i, " ", output.to_string()), output.full_tensor(), expected[i].detach());
  }
  const auto expected_loss = weighted(expected, [](const at::Tensor& each) { return each; });
  if (!expected_loss.defined() || ::testing::Test::HasFailure()) return;
  expected_loss.backward();
  weighted(outputs, [&](const at::Tensor& each) {
    return DTensor::from_local(each, mesh, Placements(static_cast<std::size_t>(mesh.ndim()), Replicate())).tensor();
  }).backward();
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    if (!leaves[i].grad().defined()) continue;
    auto cut = placements[i];
    for (auto& each : cut) each = std::holds_alternative<Partial>(each) ? Placement(Replicate()) : each;
    ASSERT_TRUE(locals[i].grad().defined()) << what;
    check_close(str(what, ": gradient ", i), locals[i].grad(),
                Layout(mesh, cut, leaves[i].sizes().vec()).cut(leaves[i].grad()));
  }
}

/// All assignments of placements, or `most` of them by chance, the same on all ranks.
inline void check_rule(const DeviceMesh& mesh, const RuleCase& rule, std::size_t most = 60) {
  std::vector<Placements> by_tensor;
  std::size_t count = 1;
  for (const auto& input : rule.inputs) {
    by_tensor.push_back(axis_placements(input));
    for (int64_t axis = 0; axis < mesh.ndim(); ++axis) count *= by_tensor.back().size();
  }
  std::mt19937 random(7);
  for (std::size_t i = 0; i < std::min(count, most) && !::testing::Test::HasFailure(); ++i) {
    auto number = count <= most ? i : random();
    std::vector<Placements> assignment;
    for (const auto& choices : by_tensor) {
      auto& placements = assignment.emplace_back();
      for (int64_t axis = 0; axis < mesh.ndim(); ++axis) {
        placements.push_back(choices[number % choices.size()]);
        number = count <= most ? number / choices.size() : random();
      }
    }
    const bool mixes = [&] {
      try {
        for (std::size_t at = 0; at < assignment.size(); ++at) {
          const Layout layout(mesh, assignment[at], rule.inputs[at].sizes().vec());
        }
        return false;
      } catch (const c10::Error&) {
        return true;  // reductions that cannot stand beside each other
      }
    }();
    if (!mixes) check_assignment(mesh, rule, assignment);
  }
}

}  // namespace lockstep::testing
