// Clipping: what the comparison with PyTorch does not show. Shards are in tests/threads/optim.
#include "lockstep/optim/clip_grad.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "lockstep/testing/checks.h"

namespace lockstep {
namespace {

using testing::expect_error;

std::vector<at::Tensor> parameters_with(const std::vector<at::Tensor>& gradients) {
  std::vector<at::Tensor> parameters;
  for (const auto& gradient : gradients) {
    parameters.push_back(at::zeros_like(gradient).requires_grad_());
    parameters.back().mutable_grad() = gradient;
  }
  return parameters;
}

TEST(ClipGrad, ScalesDownOnly) {
  const auto parameters = parameters_with({at::full({2}, 3.0), at::full({2}, 4.0)});
  const auto norm = clip_grad_norm_(parameters, 100);
  EXPECT_FLOAT_EQ(norm.item<float>(), std::sqrt(50.0F));
  EXPECT_EQ(parameters[0].grad()[0].item<float>(), 3);
  clip_grad_norm_(parameters, 1);
  EXPECT_NEAR(get_total_norm({parameters[0].grad(), parameters[1].grad()}).item<float>(), 1, 1e-5);
}

TEST(ClipGrad, OfNothingIsZero) {
  EXPECT_EQ(get_total_norm({}).item<float>(), 0);
  EXPECT_EQ(clip_grad_norm_({at::ones({2}).requires_grad_()}, 1).item<float>(), 0);
  clip_grad_value_({}, 1);
}

TEST(ClipGrad, RefusesNormsThatAreNotFiniteIfAsked) {
  for (const double bad : {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
    const auto parameters = parameters_with({at::ones({2}), at::full({2}, bad)});
    expect_error([&] { clip_grad_norm_(parameters, 1, {.error_if_nonfinite = true}); },
                 {"norm of order 2", "error_if_nonfinite"});
    EXPECT_EQ(parameters[0].grad()[0].item<float>(), 1) << "nothing was changed";
    EXPECT_FALSE(clip_grad_norm_(parameters, 1).isfinite().item<bool>());
  }
}

TEST(ClipGrad, LimitsValues) {
  const auto parameters = parameters_with({at::tensor({-3.0, 0.5, 2.0})});
  clip_grad_value_(parameters, 1);
  EXPECT_TRUE(at::equal(parameters[0].grad(), at::tensor({-1.0, 0.5, 1.0})));
}

}  // namespace
}  // namespace lockstep
