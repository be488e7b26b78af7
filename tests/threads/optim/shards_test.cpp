// Clipping and scaling of gradients that ranks hold parts of: equal to one process that holds all.
#include <torch/torch.h>

#include "lockstep/comm/collectives.h"
#include "lockstep/optim/clip_grad.h"
#include "lockstep/optim/grad_scaler.h"
#include "lockstep/optim/optimizers.h"
#include "lockstep/testing/gtest.h"

namespace lockstep {
namespace {

using testing::expect_error;

ShardReduction over(const GroupPtr& group) {
  return [group](at::Tensor& value, ShardReduce operation) {
    all_reduce(value, group,
               operation == ShardReduce::kSum   ? ReduceOp::SUM
               : operation == ShardReduce::kMax ? ReduceOp::MAX
                                                : ReduceOp::MIN);
  };
}

/// Seven gradients, the same on every rank.
std::vector<at::Tensor> all_gradients() {
  std::vector<at::Tensor> gradients;
  for (int64_t i = 1; i <= 7; ++i) gradients.push_back(at::arange(i * 5, at::kFloat).sin() * static_cast<double>(i));
  return gradients;
}

std::vector<at::Tensor> parameters_with(const std::vector<at::Tensor>& gradients) {
  std::vector<at::Tensor> parameters;
  for (const auto& gradient : gradients) {
    parameters.push_back(at::zeros_like(gradient).requires_grad_());
    parameters.back().mutable_grad() = gradient.clone();
  }
  return parameters;
}

/// Each rank has every world_size-th; the last rank none.
std::vector<at::Tensor> my_share(const std::vector<at::Tensor>& tensors, const World& world) {
  std::vector<at::Tensor> share;
  const auto owners = static_cast<std::size_t>(world.world_size() - 1);
  for (auto i = static_cast<std::size_t>(world.rank()); i < tensors.size(); i += owners) {
    if (static_cast<std::size_t>(world.rank()) < owners) share.push_back(tensors[i]);
  }
  return share;
}

// ZERO-72
LOCKSTEP_THREAD_TEST(ClipGradShards, ClipsByTheNormOfTheWhole, 3) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  for (const double norm_type : {2.0, 1.0, 3.0, kInfinity, -kInfinity, 0.0}) {
    const ::testing::ScopedTrace trace(__FILE__, __LINE__, norm_type);
    const auto whole = parameters_with(all_gradients());
    const auto expected = clip_grad_norm_(whole, 2.5, {.norm_type = norm_type});
    const auto mine = parameters_with(my_share(all_gradients(), world));
    const auto norm = clip_grad_norm_(mine, 2.5, {.norm_type = norm_type, .over_shards = over(world.group())});
    EXPECT_TRUE(at::allclose(norm, expected, 1e-6)) << norm << expected;
    const auto expected_share = my_share(whole, world);
    for (std::size_t i = 0; i < mine.size(); ++i) {
      EXPECT_TRUE(at::allclose(mine[i].grad(), expected_share[i].grad(), 1e-6));
    }
  }
}

// ZERO-72: parameters may be split anywhere
LOCKSTEP_THREAD_TEST(ClipGradShards, ClipsSlicesOfOneFlatBuffer, 4) {
  const auto whole = parameters_with({at::arange(1000, at::kFloat).cos()});
  const auto expected = clip_grad_norm_(whole, 1.0);
  const auto flat = at::arange(1000, at::kFloat).cos();
  const auto begin = 250 * world.rank();
  const auto mine = parameters_with({flat.narrow(0, begin, 250)});
  const auto norm = clip_grad_norm_(mine, 1.0, {.over_shards = over(world.group())});
  EXPECT_TRUE(at::allclose(norm, expected, 1e-6));
  EXPECT_TRUE(at::allclose(mine[0].grad(), whole[0].grad().narrow(0, begin, 250), 1e-6));
}

// ZERO-72
LOCKSTEP_THREAD_TEST(ClipGradShards, RefusesOnAllRanksWhatIsNotFiniteOnOne, 3) {
  const auto value = world.rank() == 1 ? std::numeric_limits<double>::quiet_NaN() : 1.0;
  const auto parameters = parameters_with({at::full({2}, value)});
  expect_error(
      [&] { clip_grad_norm_(parameters, 1, {.error_if_nonfinite = true, .over_shards = over(world.group())}); },
      {"norm of order 2", "nan"});
}

// The sum of the ranks' squares does not fit a float.
LOCKSTEP_THREAD_TEST(ClipGradShards, SurvivesLargeNorms, 2) {
  const auto norm = get_total_norm({at::full({4}, 8e18)}, {.over_shards = over(world.group())});
  EXPECT_TRUE(at::allclose(norm, at::full({}, 8e18 * std::sqrt(8.0)), 1e-5)) << norm;
}

// ZERO-72: one rank's overflow is every rank's, before anybody steps
LOCKSTEP_THREAD_TEST(GradScalerShards, AgreesOnStepsToLeaveOut, 3) {
  GradScaler scaler({.device = at::kCPU, .init_scale = 16, .growth_interval = 100, .agree = [&](at::Tensor& found_inf) {
                       all_reduce(found_inf, world.group(), ReduceOp::MAX);
                     }});
  const auto parameter = at::ones({2}).requires_grad_();
  optim::SGD optimizer({parameter}, {.lr = 0.25});
  for (int step = 0; step < 4; ++step) {
    const bool overflows = step == 2 && world.rank() == 1;
    optimizer.zero_grad();
    // The last rank has no gradient, as one with an empty shard.
    auto loss = scaler.scale((parameter * (overflows ? std::numeric_limits<double>::infinity() : 1.0)).sum());
    if (world.rank() != 2) loss.backward();
    scaler.step(optimizer);
    scaler.update();
  }
  EXPECT_EQ(scaler.get_scale(), 8);
  EXPECT_EQ(parameter[0].item<float>(), world.rank() == 2 ? 1 : 0.25);
}

}  // namespace
}  // namespace lockstep
