// U-8: learning rates by the step. Their values are compared with Python's in tests/oracle/optim.
#include "lockstep/optim/schedules.h"

#include "lockstep/optim/optimizers.h"
#include "lockstep/testing/checks.h"
#include "tests/support/optim_parameters.h"

namespace lockstep::schedules_test {
namespace {

using namespace optim_parameters;
using optim::CosineAnnealingLROptions;
using optim::LinearLROptions;
using testing::expect_error;

TEST(Schedules, BeginWhenTheyAreMade) {
  optim::SGD optimizer(made_parameters(), 1.0);
  optim::LinearLR schedule(optimizer, {.start_factor = 0.25, .total_iters = 3});
  EXPECT_EQ(schedule.last_lr(), std::vector{0.25});
  EXPECT_EQ(schedule.last_epoch(), 0);
  for (const double lr : {0.5, 0.75, 1.0, 1.0}) {
    schedule.step();
    EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), lr);
  }
  EXPECT_EQ(schedule.last_epoch(), 4);
}

TEST(Schedules, GoOnFromTheirState) {
  const auto parameters = made_parameters();
  const auto made = [&](torch::optim::Optimizer& optimizer) {
    return optim::SequentialLR(optimizer, {LinearLROptions{.start_factor = 0.1}, CosineAnnealingLROptions{.T_max = 9}},
                               {5});
  };
  optim::AdamW first(parameters, 0.1);
  auto schedule = made(first);
  for (int step = 0; step < 7; ++step) schedule.step();
  optim::AdamW second(parameters, 0.5);  // what the state says counts
  auto resumed = made(second);
  resumed.load_state_dict(schedule.state_dict());
  EXPECT_EQ(resumed.last_lr(), schedule.last_lr());
  schedule.step();
  resumed.step();
  EXPECT_EQ(resumed.last_lr(), schedule.last_lr());
  expect_error([&] { resumed.load_state_dict({{"last_epoch", 1.0}}); }, {"0 parameter groups", "has 1"});
}

TEST(Schedules, TakeGroupsWithRatesOfTheirOwn) {
  const auto parameters = made_parameters();
  optim::SGD optimizer({{{parameters[0]}}, {{parameters[1]}, optim::group_options(optim::SGDOptions{.lr = 0.5})}}, 2.0);
  optim::CosineAnnealingLR schedule(optimizer, {.T_max = 2});
  schedule.step();
  EXPECT_NEAR(schedule.last_lr()[0], 1.0, 1e-12);
  EXPECT_NEAR(schedule.last_lr()[1], 0.25, 1e-12);
}

TEST(Schedules, FollowAnyFunction) {
  torch::optim::SGD optimizer(made_parameters(), 1.0);
  optim::CurveLR schedule(optimizer, [](double base, int64_t steps) { return base / static_cast<double>(1 + steps); });
  schedule.step();
  EXPECT_EQ(schedule.last_lr(), std::vector{0.5});
}

// Every rank's share is stepped with the rate the schedule has set.
TEST(Schedules, DriveAZeroRedundancyOptimizer) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    std::vector<at::Tensor> parameters = {at::ones({4}).requires_grad_(), at::ones({4}).requires_grad_()};
    ZeroRedundancyOptimizer<optim::SGD> optimizer(parameters, 1.0, world.group());
    optim::LinearLR schedule(optimizer, {.start_factor = 0.5, .total_iters = 2});
    for (const double after : {0.5, -0.25, -1.25}) {
      for (auto& each : parameters) each.mutable_grad() = at::ones({4});
      optimizer.step();
      schedule.step();
      for (const auto& each : parameters) EXPECT_TRUE(at::equal(each, at::full({4}, after))) << each;
    }
  });
}

TEST(Schedules, RefuseNonsense) {
  optim::SGD optimizer(made_parameters(), 0.1);
  expect_error([&] { optim::LinearLR(optimizer, {.start_factor = 0}); }, {"start_factor", "above 0"});
  expect_error([&] { optim::LinearLR(optimizer, {.end_factor = 2}); }, {"end_factor"});
  expect_error([&] { optim::LinearLR(optimizer, {.total_iters = 0}); }, {"total_iters"});
  expect_error([&] { optim::CosineAnnealingLR(optimizer, {}); }, {"T_max"});
  expect_error([&] { optim::SequentialLR(optimizer, {LinearLROptions{}}, {3}); }, {"one milestone less"});
  expect_error([&] { optim::SequentialLR(optimizer, {CosineAnnealingLROptions{}}, {}); }, {"T_max"});
}

}  // namespace
}  // namespace lockstep::schedules_test
