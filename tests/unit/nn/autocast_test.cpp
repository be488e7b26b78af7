// U-8: mixed precision as a scope.
#include "lockstep/nn/autocast.h"

#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <stdexcept>

namespace lockstep {
namespace {

at::ScalarType dtype_of_product() {
  return at::matmul(at::ones({2, 2}), at::ones({2, 2})).scalar_type();
}

TEST(Autocast, LowersProductsInsideOnly) {
  {
    const Autocast autocast(at::kCPU, at::kBFloat16);
    EXPECT_EQ(dtype_of_product(), at::kBFloat16);
  }
  EXPECT_EQ(dtype_of_product(), at::kFloat);
}

TEST(Autocast, TakesLibtorchsDtypeIfNoneIsGiven) {
  const Autocast autocast(at::kCPU);
  EXPECT_EQ(dtype_of_product(), at::autocast::get_autocast_dtype(at::kCPU));
}

TEST(Autocast, Nests) {
  const Autocast outer(at::kCPU, at::kBFloat16);
  {
    const Autocast off(at::kCPU, std::nullopt, /*enabled=*/false);
    EXPECT_EQ(dtype_of_product(), at::kFloat);
    const Autocast other(at::kCPU, at::kHalf);
    EXPECT_EQ(dtype_of_product(), at::kHalf);
  }
  EXPECT_EQ(dtype_of_product(), at::kBFloat16);
}

TEST(Autocast, IsUndoneByAnException) {
  const auto dtype = at::autocast::get_autocast_dtype(at::kCPU);
  try {
    const Autocast autocast(at::kCPU, dtype == at::kHalf ? at::kBFloat16 : at::kHalf);
    throw std::runtime_error("leaves the scope");
  } catch (const std::runtime_error&) {
  }
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
  EXPECT_EQ(at::autocast::get_autocast_dtype(at::kCPU), dtype);
}

// A weight that was lowered in one scope is lowered anew in the next: the optimizer has changed it in between.
TEST(Autocast, ForgetsLoweredWeightsAtTheOutermostEnd) {
  const auto weight = at::ones({1, 1}).requires_grad_();
  const auto product = [&] {
    const Autocast outer(at::kCPU, at::kBFloat16);
    {
      const Autocast inner(at::kCPU, at::kBFloat16);
      at::matmul(weight, at::ones({1, 1}));
    }
    return at::matmul(weight, at::ones({1, 1})).item<float>();
  };
  EXPECT_EQ(product(), 1);
  {
    const at::NoGradGuard no_grad;
    weight.fill_(3);
  }
  EXPECT_EQ(product(), 3);
}

}  // namespace
}  // namespace lockstep
