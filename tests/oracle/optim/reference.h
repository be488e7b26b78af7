// What the reference scripts of this folder saved.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "tests/support/oracle_reference.h"

namespace lockstep::optim_oracle {

using oracle::at_key;
using oracle::tensors_of;

/// Bit by bit, if the tolerance is 0; NaN equals NaN.
inline void expect_agreement(const at::Tensor& actual, const at::Tensor& expected, double tolerance,
                             const std::string& what) {
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  ASSERT_EQ(actual.scalar_type(), expected.scalar_type()) << what;
  EXPECT_TRUE(at::allclose(actual, expected, tolerance, tolerance, /*equal_nan=*/true))
      << what << ", apart by " << (actual - expected).abs().max();
}

}  // namespace lockstep::optim_oracle
