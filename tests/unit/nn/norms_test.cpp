// RMSNorm and LayerNorm without a bias, against their formulas and libtorch's own. TP-37
#include "lockstep/nn/norms.h"

#include <gtest/gtest.h>
#include <torch/nn/modules/normalization.h>

#include <sstream>

namespace lockstep::nn {
namespace {

at::Tensor by_formula(const at::Tensor& x, const at::Tensor& weight, double eps) {
  return x * (x.pow(2).mean(-1, true) + eps).rsqrt() * weight;
}

// TP-37
TEST(Norms, RMSNormIsItsFormula) {
  RMSNorm norm(RMSNormOptions{.normalized_shape = {6}, .eps = 1e-3});
  EXPECT_TRUE(at::equal(norm->weight, at::ones({6})));
  const auto x = at::randn({4, 6}).requires_grad_();
  const at::NoGradGuard no_grad;
  norm->weight.normal_();
  EXPECT_TRUE(at::allclose(norm(x), by_formula(x, norm->weight, 1e-3)));
  RMSNorm by_default(RMSNormOptions{.normalized_shape = {6}});
  EXPECT_TRUE(at::allclose(by_default(x), by_formula(x, at::ones({6}), std::numeric_limits<float>::epsilon())));
}

// TP-37
TEST(Norms, LayerNormMayHaveNoBias) {
  LayerNorm norm(LayerNormOptions{.normalized_shape = {6}, .bias = false});
  torch::nn::LayerNorm theirs(torch::nn::LayerNormOptions({6}));
  const auto x = at::randn({4, 6});
  {
    const at::NoGradGuard no_grad;
    norm->weight.normal_();
    theirs->weight.copy_(norm->weight);
  }
  EXPECT_TRUE(at::equal(norm(x), theirs(x)));
  EXPECT_EQ(norm->parameters().size(), 1U);
  LayerNorm with_bias(LayerNormOptions{.normalized_shape = {6}});
  EXPECT_EQ(with_bias->parameters().size(), 2U);
  EXPECT_TRUE(at::equal(with_bias(x), torch::nn::LayerNorm(torch::nn::LayerNormOptions({6}))(x)));
  LayerNorm coarse(LayerNormOptions{.normalized_shape = {6}, .eps = 0.5});
  EXPECT_TRUE(at::equal(coarse(x), torch::nn::LayerNorm(torch::nn::LayerNormOptions({6}).eps(0.5))(x)));
}

TEST(Norms, HaveNoParametersWithoutAffine) {
  EXPECT_TRUE(RMSNorm(RMSNormOptions{.normalized_shape = {6}, .elementwise_affine = false})->parameters().empty());
  EXPECT_TRUE(LayerNorm(LayerNormOptions{.normalized_shape = {6}, .elementwise_affine = false})->parameters().empty());
}

TEST(Norms, AreClonedAndPrinted) {
  RMSNorm norm(RMSNormOptions{.normalized_shape = {2}});
  const auto copy = std::dynamic_pointer_cast<RMSNormImpl>(norm->clone());
  EXPECT_TRUE(at::equal(copy->weight, norm->weight));
  EXPECT_FALSE(copy->weight.is_same(norm->weight));
  LayerNorm layer(LayerNormOptions{.normalized_shape = {2}, .bias = false});
  EXPECT_EQ(std::dynamic_pointer_cast<LayerNormImpl>(layer->clone())->parameters().size(), 1U);
  std::ostringstream text;
  text << *norm << " " << *layer;
  EXPECT_EQ(text.str(),
            "lockstep::nn::RMSNorm([2], eps=None, elementwise_affine=true) "
            "lockstep::nn::LayerNorm([2], eps=1e-05, elementwise_affine=true, bias=false)");
}

}  // namespace
}  // namespace lockstep::nn
