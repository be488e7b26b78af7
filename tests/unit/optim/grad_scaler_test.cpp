// GradScaler: order of calls, what it does disabled, state.
#include "lockstep/optim/grad_scaler.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "lockstep/testing/checks.h"

namespace lockstep {
namespace {

using testing::expect_error;

GradScalerOptions on_cpu() {
  return {.device = at::kCPU, .init_scale = 8, .growth_interval = 1};
}

struct Training {
  at::Tensor parameter = at::ones({3}).requires_grad_();
  torch::optim::SGD optimizer{{parameter}, 0.5};

  void backward(GradScaler& scaler, double factor = 1) {
    optimizer.zero_grad();
    scaler.scale((parameter * factor).sum()).backward();
  }
};

TEST(GradScaler, IsMadeFromBraces) {
  EXPECT_EQ(GradScaler({}).is_enabled(), GradScaler().is_enabled());
  GradScaler scaler({.device = at::kCPU});
  EXPECT_TRUE(scaler.is_enabled());
}

TEST(GradScaler, UnscalesOnceBeforeTheStep) {
  Training training;
  GradScaler scaler(on_cpu());
  training.backward(scaler);
  EXPECT_EQ(training.parameter.grad()[0].item<float>(), 8);
  scaler.unscale_(training.optimizer);
  EXPECT_EQ(training.parameter.grad()[0].item<float>(), 1);
  expect_error([&] { scaler.unscale_(training.optimizer); }, {"unscale_() has already been called"});
  EXPECT_EQ(training.parameter.grad()[0].item<float>(), 1);
  scaler.step(training.optimizer);
  EXPECT_EQ(training.parameter[0].item<float>(), 0.5);
  expect_error([&] { scaler.step(training.optimizer); }, {"step() has already been called"});
  expect_error([&] { scaler.unscale_(training.optimizer); }, {"after step()"});
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 16);
}

TEST(GradScaler, LeavesOutStepsThatOverflow) {
  Training training;
  GradScaler scaler(on_cpu());
  training.backward(scaler, std::numeric_limits<double>::infinity());
  EXPECT_FALSE(scaler.step(training.optimizer).defined());
  EXPECT_EQ(training.parameter[0].item<float>(), 1);
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 4);
}

TEST(GradScaler, RefusesCallsOutOfOrder) {
  Training training;
  GradScaler scaler(on_cpu());
  expect_error([&] { scaler.step(training.optimizer); }, {"step() before there is a scale"});
  expect_error([&] { scaler.unscale_(training.optimizer); }, {"unscale_() before there is a scale"});
  expect_error([&] { scaler.update(); }, {"update() before there is a scale"});
  scaler.scale(at::ones({}));
  expect_error([&] { scaler.update(); }, {"update() without a step()"});
  expect_error([&] { scaler.step(training.optimizer); }, {"none of whose parameters has a gradient"});
}

TEST(GradScaler, RefusesHalfGradientsAndBadFactors) {
  const auto parameter = at::ones({3}, at::kHalf).requires_grad_();
  torch::optim::SGD optimizer({parameter}, 0.5);
  GradScaler scaler(on_cpu());
  scaler.scale(parameter.sum()).backward();
  expect_error([&] { scaler.step(optimizer); }, {"float16"});
  auto options = on_cpu();
  options.growth_factor = 1;
  expect_error([&] { GradScaler{options}; }, {"growth factor must be > 1"});
  options = on_cpu();
  options.backoff_factor = 1;
  expect_error([&] { GradScaler{options}; }, {"backoff factor must be < 1"});
}

TEST(GradScaler, TakesANewScaleAboveZeroOnly) {
  GradScaler scaler(on_cpu());
  expect_error([&] { scaler.update(4.0); }, {"update() before there is a scale"});
  scaler.scale(at::ones({}));
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  for (const double bad : {0.0, -1.0, kInfinity, -kInfinity, std::numeric_limits<double>::quiet_NaN()}) {
    expect_error([&] { scaler.update(bad); }, {"update() was given a scale of", "above 0"});
    expect_error([&] { scaler.update(at::full({}, bad)); }, {"update() was given a scale of", "above 0"});
    EXPECT_EQ(scaler.get_scale(), 8);
  }
  scaler.update(4.0);
  EXPECT_EQ(scaler.get_scale(), 4);
  scaler.update(at::full({1}, 2.0));
  EXPECT_EQ(scaler.get_scale(), 2);
}

TEST(GradScaler, PassesEverythingThroughIfDisabled) {
  Training training;
  auto options = on_cpu();
  options.enabled = false;
  GradScaler scaler(options);
  training.backward(scaler);
  scaler.unscale_(training.optimizer);
  scaler.step(training.optimizer);
  scaler.update();
  EXPECT_EQ(training.parameter[0].item<float>(), 0.5);
  EXPECT_EQ(scaler.get_scale(), 1);
  EXPECT_TRUE(scaler.state_dict().empty());
  scaler.load_state_dict({});
  EXPECT_FALSE(scaler.is_enabled());
}

TEST(GradScaler, ForCudaIsDisabledWithoutCuda) {
  if (at::hasCUDA()) GTEST_SKIP() << "there is CUDA";
  EXPECT_FALSE(GradScaler().is_enabled());
}

TEST(GradScaler, GoesOnFromLoadedState) {
  Training training;
  GradScaler from({.device = at::kCPU, .init_scale = 8, .growth_factor = 3, .growth_interval = 5});
  training.backward(from);
  from.step(training.optimizer);
  from.update();
  const auto state = from.state_dict();
  EXPECT_EQ(state.at("_growth_tracker"), 1);
  for (const bool has_scaled : {false, true}) {
    GradScaler into(on_cpu());
    if (has_scaled) into.scale(at::ones({}));
    into.load_state_dict(state);
    EXPECT_EQ(into.state_dict(), state);
    EXPECT_EQ(into.scale(at::ones({})).item<float>(), 8);
    EXPECT_EQ(into.state_dict(), state);
  }
  GradScaler into(on_cpu());
  expect_error([&] { into.load_state_dict({}); }, {"state is empty"});
  expect_error([&] { into.load_state_dict({{"scale", 2}}); }, {"no 'growth_factor'"});
  EXPECT_EQ(into.get_scale(), 8);
}

}  // namespace
}  // namespace lockstep
