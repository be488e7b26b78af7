// Small programs that combine tensor parallelism with something else, each against one device: what is wrong must not
// train on in silence.
#include <ATen/autocast_mode.h>

#include "lockstep/checkpointing/checkpoint.h"
#include "lockstep/comm/world.h"
#include "lockstep/ddp/distributed_data_parallel.h"
#include "lockstep/dtensor/dtensor.h"
#include "lockstep/optim/clip_grad.h"
#include "lockstep/testing/gtest.h"
#include "lockstep/testing/recorder.h"
#include "lockstep/tp/parallelize_module.h"
#include "lockstep/zero/zero_redundancy_optimizer.h"
#include "tests/support/dtensor_line.h"
#include "tests/support/tensor_parallel_pairs.h"

namespace lockstep::tp_mixtures_test {
namespace {

using namespace tensor_parallel_pairs;  // NOLINT(google-build-using-namespace)
using testing::expect_error;
using testing::line;

ParallelPlan mlp_plan() {
  return {{"in", ColwiseParallel()}, {"out", RowwiseParallel()}};
}

at::Tensor batch(uint64_t seed, at::IntArrayRef sizes = {3, 8}) {
  return built_from_seed([&] { return at::randn(sizes); }, seed);
}

struct Pair {
  explicit Pair(const DeviceMesh& mesh) {
    std::tie(model, whole) = pair_of([] { return Mlp(8, 12); });
    parallelize_module(model, mesh, mlp_plan());
  }
  void backward(const at::Tensor& x) {
    model(x).pow(2).sum().backward();
    whole(x).pow(2).sum().backward();
  }
  Mlp model{nullptr};
  Mlp whole{nullptr};
};

LOCKSTEP_THREAD_TEST(TpMixtures, AnOptimizerMadeBeforeGoesOn, 2) {
  auto [model, whole] = pair_of([] { return Mlp(8, 12); });
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  torch::optim::SGD of_whole(whole->parameters(), 0.1);
  parallelize_module(model, line(world), mlp_plan());
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    of_whole.zero_grad();
    model(batch(step)).pow(2).sum().backward();
    whole(batch(step)).pow(2).sum().backward();
    optimizer.step();
    of_whole.step();
    expect_parts(*model, *whole);
  }
}

LOCKSTEP_THREAD_TEST(TpMixtures, AnOptimizerOfMembersIsRefused, 2) {
  Pair pair(line(world));
  torch::optim::SGD optimizer({pair.model->in->weight}, 0.1);
  pair.model(batch(1)).sum().backward();
  expect_error([&] { optimizer.step(); }, {"in.weight", "parameters()"});
  expect_error([&] { optimizer.zero_grad(); }, {"in.weight", "parameters()"});
}

LOCKSTEP_THREAD_TEST(TpMixtures, NormsOfPartsAreRefusedAndOursCountsAll, 2) {
  Pair pair(line(world));
  pair.backward(batch(1));
  expect_error([&] { torch::nn::utils::clip_grad_norm_(pair.model->parameters(), 0.1); }, {"clip_grad_norm_"});
  const auto norm = clip_grad_norm_(pair.model->parameters(), 0.1);
  EXPECT_NEAR(norm.item<double>(), torch::nn::utils::clip_grad_norm_(pair.whole->parameters(), 0.1), 1e-4);
  expect_parts(*pair.model, *pair.whole);
}

LOCKSTEP_THREAD_TEST(TpMixtures, FreezingAMemberFreezesItsParameter, 2) {
  Pair pair(line(world));
  pair.model->in->weight.set_requires_grad(false);
  pair.whole->in->weight.set_requires_grad(false);
  pair.backward(batch(1));
  expect_parts(*pair.model, *pair.whole);
  pair.model->in->weight.set_requires_grad(true);
  pair.whole->in->weight.set_requires_grad(true);
  pair.backward(batch(2));
  expect_parts(*pair.model, *pair.whole);
  for (auto& parameter : pair.model->out->parameters()) parameter.set_requires_grad(false);
  for (auto& parameter : pair.whole->out->parameters()) parameter.set_requires_grad(false);
  pair.backward(batch(3));
  expect_parts(*pair.model, *pair.whole);
}

LOCKSTEP_THREAD_TEST(TpMixtures, PenaltiesOnMembersReachTheirParameters, 2) {
  Pair pair(line(world));
  const auto loss_of = [](Mlp& model, const at::Tensor& x) {
    auto penalty = model->in->weight.pow(2).sum() + model->out->weight.abs().sum();
    if (is_dtensor(penalty)) penalty = DTensor(penalty).full_tensor();
    return model(x).pow(2).sum() + 0.1 * penalty;
  };
  loss_of(pair.model, batch(1)).backward();
  loss_of(pair.whole, batch(1)).backward();
  expect_parts(*pair.model, *pair.whole);
}

LOCKSTEP_THREAD_TEST(TpMixtures, WhatInitialisesMembersInitialisesParameters, 2) {
  Pair pair(line(world));
  for (auto* model : {&pair.model, &pair.whole}) {
    const at::NoGradGuard no_grad;
    (*model)->in->weight.fill_(0.25);
    (*model)->out->weight.mul_(3);
    (*model)->in->bias.zero_();
  }
  pair.backward(batch(1));
  expect_parts(*pair.model, *pair.whole);
}

// An input whose memory is filled again, without a word to autograd.
LOCKSTEP_THREAD_TEST(TpMixtures, AnInputThatIsFilledAgainIsReadAgain, 2) {
  auto [model, whole] = pair_of([] { return torch::nn::Linear(8, 6); });
  parallelize_module(*model, line(world), ColwiseParallel({.input_layouts = Shard(0), .output_layouts = Replicate()}));
  std::vector<float> memory(4 * 8);
  const auto x = at::from_blob(memory.data(), {4, 8});
  for (const bool is_training : {true, false}) {
    const at::AutoGradMode mode(is_training);
    at::Tensor last;
    for (int step = 0; step < 3; ++step) {
      const auto all = batch(step, {8, 8});
      std::memcpy(memory.data(), all.chunk(2)[world.rank()].contiguous().data_ptr(), memory.size() * sizeof(float));
      last = model(x);
      expect_close("output", last, whole(all));
    }
  }
}

LOCKSTEP_THREAD_TEST(TpMixtures, InferenceModeComputesTheSame, 2) {
  Pair pair(line(world));
  const c10::InferenceMode mode;
  auto x = batch(1).clone();
  expect_close("first", pair.model(x), pair.whole(x));
  x.add_(1);
  expect_close("second", pair.model(x), pair.whole(x));
}

LOCKSTEP_THREAD_TEST(TpMixtures, GradientsAddUpAndGraphsAreRetained, 2) {
  Pair pair(line(world));
  for (auto* model : {&pair.model, &pair.whole}) {
    const auto loss = (*model)(batch(1)).pow(2).sum();
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
    (*model)(batch(2)).sum().backward();
  }
  expect_parts(*pair.model, *pair.whole);
}

LOCKSTEP_THREAD_TEST(TpMixtures, SeveralForwardsBeforeOneBackward, 2) {
  Pair pair(line(world));
  for (auto* model : {&pair.model, &pair.whole}) {
    const auto first = (*model)(batch(1));
    const auto second = (*model)((*model)(batch(2)));
    (first * second).sum().backward();
  }
  expect_parts(*pair.model, *pair.whole);
}

LOCKSTEP_THREAD_TEST(TpMixtures, ABadInputIsRefusedAndTheNextOneWorks, 2) {
  Pair pair(line(world));
  expect_error([&] { pair.model(batch(1, {3, 7})); }, {"7"});
  expect_error([&] { pair.model->out(batch(1, {3, 12})); }, {"24", "12"});
  pair.backward(batch(1));
  expect_parts(*pair.model, *pair.whole);
}

LOCKSTEP_THREAD_TEST(TpMixtures, GradientPenaltiesAreDifferentiatedTwice, 2) {
  Pair pair(line(world));
  for (auto* model : {&pair.model, &pair.whole}) {
    const auto x = batch(1).requires_grad_();
    const auto loss = (*model)(x).pow(2).sum();
    const auto slope = torch::autograd::grad({loss}, {x}, {}, std::nullopt, /*create_graph=*/true)[0];
    (loss + slope.pow(2).sum()).backward();
  }
  expect_parts(*pair.model, *pair.whole);
}

LOCKSTEP_THREAD_TEST(TpMixtures, CheckpointsRecomputeTheSame, 2) {
  Pair pair(line(world));
  checkpoint([&](const at::Tensor& x) { return pair.model(x); }, batch(1).requires_grad_()).pow(2).sum().backward();
  pair.whole(batch(1)).pow(2).sum().backward();
  expect_parts(*pair.model, *pair.whole);
}

// Recomputed, dropout draws the mask it drew.
LOCKSTEP_THREAD_TEST(TpMixtures, CheckpointsDrawTheSameMasksAgain, 2) {
  const auto mesh = line(world);
  auto model = built_from_seed([] { return Mlp(8, 12); }, 1);
  parallelize_module(model, mesh, {{"in", ColwiseParallel({.use_local_output = false})}, {"out", RowwiseParallel()}});
  at::Tensor masked;
  const auto forward = [&](const at::Tensor& x) {
    const auto hidden = at::dropout(model->in(x), 0.5, /*train=*/true);
    masked = DTensor(hidden).full_tensor().detach();
    return model->out(hidden);
  };
  const auto y = checkpoint(forward, batch(1).requires_grad_());
  const auto first = masked;
  masked = at::Tensor();
  y.sum().backward();
  ASSERT_TRUE(masked.defined());
  expect_close("masked again", masked, first);
}

LOCKSTEP_THREAD_TEST(TpMixtures, AutocastTrains, 2) {
  Pair pair(line(world));
  const auto loss_of = [](Mlp& model) {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    const auto loss = model(batch(1)).pow(2).sum();
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
    return loss;
  };
  const auto mine = loss_of(pair.model);
  const auto expected = loss_of(pair.whole);
  EXPECT_NEAR(mine.item<double>() / expected.item<double>(), 1, 0.02);
  mine.backward();
  expected.backward();
  for (const auto& parameter : pair.model->named_parameters()) {
    const auto layout = layout_of(parameter.value());
    const auto other = layout->cut(pair.whole->named_parameters()[parameter.key()].grad());
    EXPECT_EQ(parameter.value().grad().scalar_type(), at::kFloat);
    EXPECT_LT((parameter.value().grad() - other).norm().item<double>(), 0.05 * other.norm().item<double>() + 0.05);
  }
}

LOCKSTEP_THREAD_TEST(TpMixtures, ComplexLayersTrain, 2) {
  auto [model, whole] = pair_of([] { return Mlp(8, 12); });
  model->to(at::kComplexFloat);
  whole->to(at::kComplexFloat);
  for (auto* each : {&model, &whole}) {
    const at::NoGradGuard no_grad;
    for (auto& parameter : (*each)->parameters()) parameter.mul_(c10::complex<double>(0.6, 0.8));
  }
  parallelize_module(model, line(world), mlp_plan());
  const auto x = at::complex(batch(1), batch(2));
  for (auto* each : {&model, &whole}) at::real((*each)(x).pow(2)).sum().backward();
  expect_parts(*model, *whole);
}

LOCKSTEP_THREAD_TEST(TpMixtures, OddShapesWork, 2) {
  for (const auto& sizes : {std::vector<int64_t>{8}, {0, 8}, {2, 0, 8}, {2, 2, 2, 8}}) {
    Pair pair(line(world));
    pair.backward(batch(1, sizes));
    expect_parts(*pair.model, *pair.whole);
  }
}

LOCKSTEP_THREAD_TEST(TpMixtures, RanksWithoutAPartOfALayerTakePart, 3) {
  auto [model, whole] = pair_of([] { return Mlp(4, 2); });
  parallelize_module(model, line(world), mlp_plan());
  model(batch(1, {3, 4})).pow(2).sum().backward();
  whole(batch(1, {3, 4})).pow(2).sum().backward();
  expect_parts(*model, *whole);
}

LOCKSTEP_THREAD_TEST(TpMixtures, TwoModelsShareAnInput, 2) {
  Pair first(line(world));
  Pair second(line(world));
  const auto x = batch(1).requires_grad_();
  const auto y = batch(1).requires_grad_();
  (first.model(x) * second.model(x)).sum().backward();
  (first.whole(y) * second.whole(y)).sum().backward();
  expect_close("input", x.grad(), y.grad());
  expect_parts(*first.model, *first.whole);
  expect_parts(*second.model, *second.whole);
}

LOCKSTEP_THREAD_TEST(TpMixtures, HooksOfParametersSeeTheirGradientsOnce, 2) {
  Pair pair(line(world));
  int calls = 0;
  at::Tensor seen;
  pair.model->in->named_parameters()["weight"].register_hook([&](const at::Tensor& gradient) {
    ++calls;
    seen = gradient.clone();
  });
  pair.backward(batch(1));
  EXPECT_EQ(calls, 1);
  expect_close("seen", seen, pair.whole->in->weight.grad().chunk(2)[world.rank()]);
}

LOCKSTEP_THREAD_TEST(TpMixtures, WholeValuesInAPartsPlaceAreRefused, 2) {
  Pair pair(line(world));
  pair.model->in->named_parameters()["weight"].set_data(pair.whole->in->weight.detach().clone());
  expect_error([&] { pair.model(batch(1)); }, {"'in'", "[12, 8]", "[6, 8]"});
}

// Averages over ranks that hold different parts would mix them.
LOCKSTEP_THREAD_TEST(TpMixtures, AveragesOverPartsAreRefused, 4) {
  const auto mesh = init_device_mesh("cpu", {2, 2}, {.mesh_dim_names = {"dp", "tp"}});
  Pair pair(mesh["tp"]);
  expect_error([&] { DistributedDataParallel<Mlp> ddp(pair.model, world.group()); }, {"weight"});
  expect_error(
      [&] { ZeroRedundancyOptimizer<optim::AdamW> zero(pair.model->parameters(), {.lr = 0.1}, ZeroOptions{}); },
      {"shard"});

  DistributedDataParallel<Mlp> ddp(pair.model, mesh["dp"].get_group());
  const auto all = batch(1, {4, 8});
  ddp(all.chunk(2)[mesh.get_local_rank("dp")]).pow(2).mean().backward();
  pair.whole(all).pow(2).mean().backward();
  expect_parts(*pair.model, *pair.whole);
}

}  // namespace
}  // namespace lockstep::tp_mixtures_test
