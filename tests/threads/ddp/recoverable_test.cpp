// DdpOptions::recoverable while nobody dies: trains to the same bits as without it, whatever else is set.
#include <limits>
#include <optional>

#include "lockstep/optim/clip_grad.h"
#include "lockstep/optim/grad_scaler.h"
#include "tests/support/ddp_models.h"

namespace lockstep::recoverable_test {
namespace {

using namespace ddp_models;
using testing::Recorder;

constexpr int kSteps = 4;

struct Trained {
  std::vector<at::Tensor> parameters;
  std::size_t launches = 0;
};

/// Steps of train(ddp, optimizer, step), without and with the option: each reduction has one more collective, and that
/// is all.
template <class Make, class Train>
void expect_same_bits(const World& world, const Make& make, DdpOptions options, const Train& train,
                      const std::string& what) {
  const auto run = [&](bool is_recoverable) {
    options.process_group = world.group();
    options.bucket_cap_mb = 0.0005;
    options.recoverable = is_recoverable;
    DistributedDataParallel ddp(make(), options);
    torch::optim::SGD optimizer(ddp.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    const Recorder recorder;
    for (int step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      train(ddp, optimizer, step);
    }
    return Trained{.parameters = ddp.parameters(), .launches = recorder.events("launch").size()};
  };
  const auto plain = run(false);
  const auto recoverable = run(true);
  const auto untrained = make();
  EXPECT_EQ(recoverable.launches, plain.launches + kSteps) << what << ": a vote in each step";
  for (std::size_t i = 0; i < plain.parameters.size(); ++i) {
    EXPECT_TRUE(at::equal(recoverable.parameters[i], plain.parameters[i])) << what << ", parameter " << i;
    EXPECT_FALSE(at::equal(plain.parameters[i], untrained->parameters()[i])) << what << ", parameter " << i;
  }
}

at::Tensor rows_of(const World& world, int step, int64_t columns) {
  return my_rows(random_batch(6, columns, 10 + step), world);
}

Mlp made_mlp() {
  return mlp({5, 16, 16, 3});
}

Branchy made_branchy() {
  return seeded(Branchy());
}

LOCKSTEP_THREAD_TEST(DdpRecoverable, TrainsToTheSameBits, 2) {
  const auto train = [&](auto& ddp, torch::optim::Optimizer& optimizer, int step) {
    ddp(rows_of(world, step, 5)).pow(2).mean().backward();
    optimizer.step();
  };
  expect_same_bits(world, made_mlp, {}, train, "plain");
  expect_same_bits(world, made_mlp, {.static_graph = true}, train, "static_graph");
  expect_same_bits(world, made_mlp, {.find_unused_parameters = true}, train, "find_unused_parameters");
  expect_same_bits(world, made_mlp, {.mixed_precision = MixedPrecision{.param_dtype = at::kBFloat16}}, train, "bf16");
  expect_same_bits(world, made_mlp,
                   {.mixed_precision = MixedPrecision{.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}}, train,
                   "bf16, reduced in float");
}

LOCKSTEP_THREAD_TEST(DdpRecoverable, LeavesUnusedParametersAlone, 2) {
  // The ranks use different branches, in the last step none of them the left one.
  const auto train = [&](auto& ddp, torch::optim::Optimizer& optimizer, int step) {
    const bool is_first = world.rank() == 0;
    ddp(rows_of(world, step, 4), is_first && step + 1 < kSteps, !is_first).pow(2).mean().backward();
    EXPECT_EQ(ddp.module()->left->weight.grad().defined(), step + 1 < kSteps);
    optimizer.step();
  };
  expect_same_bits(world, made_branchy, {.find_unused_parameters = true}, train, "find_unused_parameters");
}

LOCKSTEP_THREAD_TEST(DdpRecoverable, AccumulatesInNoSync, 2) {
  const auto train = [&](auto& ddp, torch::optim::Optimizer& optimizer, int step) {
    {
      const auto local = ddp.no_sync();
      ddp(rows_of(world, 3 * step, 5)).pow(2).mean().backward();
      ddp(rows_of(world, 3 * step + 1, 5)).pow(2).mean().backward();
    }
    ddp(rows_of(world, 3 * step + 2, 5)).pow(2).mean().backward();
    optimizer.step();
  };
  expect_same_bits(world, made_mlp, {}, train, "plain");
  expect_same_bits(world, made_mlp, {.find_unused_parameters = true}, train, "find_unused_parameters");
  expect_same_bits(world, made_mlp, {.mixed_precision = MixedPrecision{.param_dtype = at::kBFloat16}}, train, "bf16");
}

LOCKSTEP_THREAD_TEST(DdpRecoverable, ClipsAndLeavesOutSteps, 2) {
  std::optional<GradScaler> scaler;
  const auto train = [&](auto& ddp, torch::optim::Optimizer& optimizer, int step) {
    if (step == 0) scaler.emplace(GradScalerOptions{.device = at::kCPU, .init_scale = 1024, .growth_interval = 100});
    const bool overflows = step == 2 && world.rank() == 1;
    const auto loss = ddp(rows_of(world, step, 5)).pow(2).mean();
    scaler->scale(overflows ? loss * std::numeric_limits<double>::infinity() : loss).backward();
    scaler->unscale_(optimizer);
    clip_grad_norm_(ddp.parameters(), 0.05);
    scaler->step(optimizer);
    scaler->update();
    EXPECT_EQ(scaler->get_scale(), step < 2 ? 1024 : 512) << "one step was left out, on both ranks";
  };
  expect_same_bits(world, made_mlp, {}, train, "plain");
}

}  // namespace
}  // namespace lockstep::recoverable_test
