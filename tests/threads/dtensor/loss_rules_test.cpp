// Cross entropy of DTensors against one device: logits cut in any dim, gathered, and in a LossParallel scope.
#include <torch/nn/functional/loss.h>

#include "lockstep/comm/world.h"
#include "lockstep/testing/recorder.h"
#include "lockstep/tp/loss_parallel.h"
#include "tests/support/dtensor_rules.h"

namespace lockstep::loss_rules_test {
namespace {

namespace F = torch::nn::functional;
using testing::check_rule;
using testing::expect_error;
using testing::integers;
using testing::normal;
using testing::RuleCase;
using testing::Tensors;

const std::vector<std::pair<std::string, at::Reduction::Reduction>> kReductions = {
    {"none", at::Reduction::None}, {"mean", at::Reduction::Mean}, {"sum", at::Reduction::Sum}};

/// Of logits, target and maybe class weights, with a target to be ignored.
std::vector<RuleCase> cases_of(const std::vector<int64_t>& sizes, bool is_parallel) {
  std::vector<RuleCase> cases;
  auto target_sizes = sizes;
  target_sizes.erase(target_sizes.begin() + (sizes.size() > 1 ? 1 : 0));
  const auto classes = sizes[sizes.size() > 1 ? 1 : 0];
  const auto logits = normal(sizes, 1) * 3;
  const auto target = integers(classes, target_sizes, 2);
  const auto weight = normal({classes}, 3).abs().add(0.1).detach();
  for (const auto& [name, reduction] : kReductions) {
    for (const bool is_weighted : {false, true}) {
      RuleCase rule{
          str("cross_entropy ", name, is_weighted ? " weighted" : "", is_parallel ? " parallel" : ""),
          {logits, target},
          [weight, is_weighted, is_parallel, reduction](const Tensors& a) {
            std::optional<LossParallel> scope;
            if (is_parallel) scope.emplace();
            const auto ignored = a[1].dim() > 0 ? 1 : -100;
            return Tensors{at::cross_entropy_loss(a[0], a[1], is_weighted ? weight : at::Tensor(), reduction, ignored)};
          }};
      cases.push_back(std::move(rule));
    }
  }
  return cases;
}

void check_all(const DeviceMesh& mesh, bool is_parallel) {
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{4, 6}, {5, 7}, {3, 2}, {2, 5, 2, 3}, {3, 4, 2}, {5}}) {
    for (const auto& each : cases_of(sizes, is_parallel)) check_rule(mesh, each, mesh.ndim() == 1 ? 24 : 10);
  }
}

LOCKSTEP_THREAD_TEST(LossRules, OnTwoRanks, 2) {
  check_all(init_device_mesh("cpu", {2}), false);
}

LOCKSTEP_THREAD_TEST(LossRules, OnThreeRanks, 3) {
  check_all(init_device_mesh("cpu", {3}), false);
}

LOCKSTEP_THREAD_TEST(LossRules, OnASquare, 4) {
  check_all(init_device_mesh("cpu", {2, 2}), false);
}

// TP-46, TP-47: all reductions, class weights, an ignored index, uneven classes, ranks without a class
LOCKSTEP_THREAD_TEST(LossParallel, OnTwoRanks, 2) {
  check_all(init_device_mesh("cpu", {2}), true);
}

// TP-46, TP-47
LOCKSTEP_THREAD_TEST(LossParallel, OnThreeRanks, 3) {
  check_all(init_device_mesh("cpu", {3}), true);
}

// TP-48: samples cut along another axis; a mean is that of all samples
LOCKSTEP_THREAD_TEST(LossParallel, OnASquare, 4) {
  check_all(init_device_mesh("cpu", {2, 2}), true);
}

// TP-46: max, sum and loss are reduced, the logits are not gathered; the backward sends nothing, even after the scope
LOCKSTEP_THREAD_TEST(LossParallel, DoesNotGatherLogits, 3) {
  const auto mesh = init_device_mesh("cpu", {3});
  const auto logits = distribute_tensor(normal({4, 7}, 1).requires_grad_(), mesh, {Shard(1)});
  const auto target = integers(7, {4}, 2);
  const testing::Recorder recorder;
  at::Tensor loss;
  {
    const LossParallel scope;
    loss = F::cross_entropy(logits.tensor(), target);
  }
  testing::expect_exact_order(recorder.events("launch"), {"all_reduce", "all_reduce", "all_reduce"});
  EXPECT_EQ(DTensor(loss).placements(), (Placements{Replicate()}));
  loss.backward();
  EXPECT_EQ(recorder.events("launch").size(), 3U);
  EXPECT_EQ(DTensor(logits.tensor().grad()).placements(), (Placements{Shard(1)}));
}

// TP-46: outside of the scope the logits are gathered, as in Python
LOCKSTEP_THREAD_TEST(LossParallel, IsLeftToTheScope, 2) {
  const auto mesh = init_device_mesh("cpu", {2});
  const auto logits = distribute_tensor(normal({4, 7}, 1), mesh, {Shard(1)});
  const testing::Recorder recorder;
  F::cross_entropy(logits.tensor(), integers(7, {4}, 2));
  testing::expect_exact_order(recorder.events("launch"), {"all_gather_into_tensor"});
}

// TP-47: logarithms that something else than nll_loss uses, too, as label smoothing and class probabilities do: the
// backward does not take part of the gradient for all.
LOCKSTEP_THREAD_TEST(LossParallel, IsRightForOtherUsesOfLogarithms, 2) {
  const auto mesh = init_device_mesh("cpu", {2});
  RuleCase rule{"entropy", {normal({4, 5}, 1), integers(5, {4}, 2)}, [](const Tensors& a) {
                  const LossParallel scope;
                  const auto logarithms = a[0].log_softmax(1);
                  return Tensors{at::nll_loss(logarithms, a[1]), (logarithms.exp() * logarithms).sum()};
                }};
  check_rule(mesh, rule);
  rule.name = "label smoothing";
  rule.run = [](const Tensors& a) {
    const LossParallel scope;
    return Tensors{at::cross_entropy_loss(a[0], a[1], {}, at::Reduction::Mean, -100, /*label_smoothing=*/0.1)};
  };
  check_rule(mesh, rule);
  rule = {"probabilities", {normal({4, 5}, 1), normal({4, 5}, 2).softmax(1)}, [](const Tensors& a) {
            const LossParallel scope;
            return Tensors{at::cross_entropy_loss(a[0], a[1])};
          }};
  check_rule(mesh, rule);
}

// TP-48: an ordinary target is a replica
LOCKSTEP_THREAD_TEST(LossParallel, RefusesAnOrdinaryTargetOfCutSamples, 4) {
  const auto mesh = init_device_mesh("cpu", {2, 2});
  const auto logits = distribute_tensor(normal({4, 7}, 1), mesh, {Shard(0), Shard(1)});
  const LossParallel scope;
  expect_error([&] { F::cross_entropy(logits.tensor(), integers(7, {4}, 2)); },
               {"nll_loss_forward", "samples are cut", "distribute_tensor()"});
  const auto whole = distribute_tensor(normal({4, 7}, 1), mesh, {Replicate(), Shard(1)});
  EXPECT_EQ(DTensor(F::cross_entropy(whole.tensor(), integers(7, {4}, 2))).placements(),
            (Placements{Replicate(), Replicate()}));
}

// A target that is no class is an error as on one device.
LOCKSTEP_THREAD_TEST(LossParallel, RefusesATargetThatIsNoClass, 2) {
  const auto mesh = init_device_mesh("cpu", {2});
  const auto logits = distribute_tensor(normal({4, 7}, 1), mesh, {Shard(1)});
  const LossParallel scope;
  expect_error([&] { F::cross_entropy(logits.tensor(), at::full({4}, 7, at::kLong)); }, {"none of the classes"});
}

}  // namespace
}  // namespace lockstep::loss_rules_test
