// Steps among processes, over shared memory and over gloo; and what the others see when a rank fails or dies.
#include <stdlib.h>

#include "lockstep/base/str.h"
#include "lockstep/comm/barrier.h"
#include "tests/support/ddp_models.h"
#include "tests/support/zero_fixtures.h"

namespace lockstep {
namespace {

using namespace zero_fixtures;
using namespace std::chrono_literals;
using testing::expect_error;
using testing::run_processes_from_gtest;
using torch::optim::AdamW;

/// Ranks end with this once they saw what they should see: a gloo group that failed is not destroyed in time.
constexpr int kSawIt = 42;

class ZeroProcesses : public ::testing::TestWithParam<std::string> {};

INSTANTIATE_TEST_SUITE_P(Backends, ZeroProcesses, ::testing::Values("gloo", "shm"),
                         [](const auto& info) { return info.param; });

// ZERO-26, ZERO-66
TEST_P(ZeroProcesses, TrainAsDdpWithThePlainOptimizer) {
  testing::run_processes_in_gtest({.world_size = 3, .backend = GetParam()}, [](const World& world) {
    for (const auto& [name, zero] : ways(world.group())) {
      const auto plain_model = ddp_models::mlp({20, 300, 500, 3});
      const auto model = ddp_models::mlp({20, 300, 500, 3});
      DistributedDataParallel plain_ddp(plain_model, world.group());
      DistributedDataParallel ddp(model, world.group());
      AdamW plain(plain_model->parameters(), 0.01);
      ZeroRedundancyOptimizer<AdamW> optimizer(model->parameters(), {0.01}, zero);
      for (int step = 0; step < 5; ++step) {
        const auto input = ddp_models::random_batch(6, 20, 10 * step + world.rank());
        plain.zero_grad();
        optimizer.zero_grad();
        plain_ddp(input).pow(2).mean().backward();
        ddp(input).pow(2).mean().backward();
        plain.step();
        optimizer.step();
        expect_same(model->parameters(), plain_model->parameters(), name);
      }
      optimizer.consolidate_state_dict(2);
      if (world.rank() == 2) expect_same_state(optimizer.state_dict(), state_dict_of(plain));
    }
  });
}

struct Doomed : AdamW {
  using AdamW::AdamW;
  at::Tensor step(LossClosure closure) override {
    if (in_step) in_step();
    return AdamW::step(closure);
  }
  std::function<void()> in_step;
};

/// Rank 1 does `fail` in its third step; the others must throw within seconds, with these words.
void expect_others_throw(const World& world, const std::function<void()>& fail, const std::vector<std::string>& words) {
  const auto parameters = parameters_of({{40, 30}, {500}, {6}, {7}});
  ZeroRedundancyOptimizer<Doomed> optimizer(parameters, {}, world.group());
  for (int step = 0; step < 2; ++step) {
    set_gradients(parameters, step);
    optimizer.step();
  }
  barrier(world.group());
  if (world.rank() == 1) optimizer.local_optimizer().in_step = fail;
  const auto start = std::chrono::steady_clock::now();
  expect_error([&] { optimizer.step(); }, world.rank() == 1 ? std::vector<std::string>{"the gradient is odd"} : words);
  EXPECT_LT(std::chrono::steady_clock::now() - start, 10s);
  if (!::testing::Test::HasFailure()) std::_Exit(kSawIt);
}

// ZERO-25
TEST_P(ZeroProcesses, AreToldWhenOneThrows) {
  const auto report = run_processes_from_gtest(
      {.world_size = 3, .backend = GetParam(), .timeout = 60s, .expected_exit_code = kSawIt}, [](const World& world) {
        expect_others_throw(world, [] { throw std::runtime_error("the gradient is odd"); },
                            {"rank 1 left by an exception: the gradient is odd"});
      });
  EXPECT_TRUE(report.has_passed()) << report.describe();
}

// ZERO-25
TEST_P(ZeroProcesses, NoticeWhenOneDies) {
  const auto report = run_processes_from_gtest(
      {.world_size = 3, .backend = GetParam(), .timeout = 60s, .expected_exit_code = kSawIt},
      [](const World& world) { expect_others_throw(world, [] { std::_Exit(kSawIt); }, {"rank 1"}); });
  EXPECT_TRUE(report.has_passed()) << report.describe();
}

}  // namespace
}  // namespace lockstep
