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

// ZERO-26, ZERO-66, ZERO-75
TEST_P(ZeroProcesses, TrainAsDdpWithThePlainOptimizer) {
  testing::run_processes_in_gtest({.world_size = 3, .backend = GetParam()}, [](const World& world) {
    auto all = ways(world.group());
    for (auto [name, zero] : ways(world.group())) {
      zero.overlap_parameter_sync = true;
      all.emplace_back(name + ", overlapped", zero);
    }
    for (const auto& [name, zero] : all) {
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

/// Rank 1 does `fail` in its third step; the others must throw within seconds, with these words: in that step, or when
/// they read parameters.
void expect_others_throw(const World& world, const std::function<void()>& fail, const std::vector<std::string>& words,
                         bool is_overlapped) {
  const auto parameters = parameters_of({{40, 30}, {500}, {6}, {7}});
  ZeroRedundancyOptimizer<Doomed> optimizer(parameters, {},
                                            {.process_group = world.group(), .overlap_parameter_sync = is_overlapped});
  for (int step = 0; step < 2; ++step) {
    set_gradients(parameters, step);
    optimizer.step();
  }
  barrier(world.group());
  if (world.rank() == 1) optimizer.local_optimizer().in_step = fail;
  const auto start = std::chrono::steady_clock::now();
  const auto step_and_read = [&] {
    optimizer.step();
    if (is_overlapped) static_cast<void>(parameters[0].sum());
  };
  expect_error(step_and_read, world.rank() == 1 ? std::vector<std::string>{"the gradient is odd"} : words);
  EXPECT_LT(std::chrono::steady_clock::now() - start, 10s);
  if (!::testing::Test::HasFailure()) std::_Exit(kSawIt);
}

// ZERO-25, ZERO-75
TEST_P(ZeroProcesses, AreToldWhenOneThrows) {
  for (const bool is_overlapped : {false, true}) {
    const auto report =
        run_processes_from_gtest({.world_size = 3, .backend = GetParam(), .timeout = 60s, .expected_exit_code = kSawIt},
                                 [&](const World& world) {
                                   expect_others_throw(
                                       world, [] { throw std::runtime_error("the gradient is odd"); },
                                       {"rank 1 left by an exception: the gradient is odd"}, is_overlapped);
                                 });
    EXPECT_TRUE(report.has_passed()) << report.describe();
  }
}

// ZERO-25, ZERO-75
TEST_P(ZeroProcesses, NoticeWhenOneDies) {
  for (const bool is_overlapped : {false, true}) {
    const auto report = run_processes_from_gtest(
        {.world_size = 3, .backend = GetParam(), .timeout = 60s, .expected_exit_code = kSawIt},
        [&](const World& world) { expect_others_throw(world, [] { std::_Exit(kSawIt); }, {"rank 1"}, is_overlapped); });
    EXPECT_TRUE(report.has_passed()) << report.describe();
  }
}

// ZERO-75
TEST_P(ZeroProcesses, MayEndWhileParametersAreOnTheirWay) {
  testing::run_processes_in_gtest({.world_size = 3, .backend = GetParam()}, [](const World& world) {
    for (auto [name, zero] : ways(world.group())) {
      zero.overlap_parameter_sync = true;
      const auto parameters = parameters_of({{1000, 1000}, {500}, {600, 700}});
      ZeroRedundancyOptimizer<AdamW> optimizer(parameters, {}, zero);
      set_gradients(parameters, 1);
      optimizer.step();
    }
  });
}

}  // namespace
}  // namespace lockstep
