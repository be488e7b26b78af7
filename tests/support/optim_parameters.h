// Parameters and a training of sorts for the optimizer tests.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "lockstep/testing/checks.h"

namespace lockstep::optim_parameters {

inline void expect_error(const std::function<void()>& action, const std::string& part) {
  testing::expect_error(action, {part});
}

inline std::vector<at::Tensor> made_parameters(int64_t seed = 1, at::ScalarType dtype = at::kFloat) {
  torch::manual_seed(seed);
  std::vector<at::Tensor> parameters;
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{4, 3}, {5}, {}}) {
    parameters.push_back(at::randn(sizes, dtype).requires_grad_());
  }
  return parameters;
}

/// Gradients that depend on the parameters, as they do in training.
inline void fill_gradients(const std::vector<at::Tensor>& parameters) {
  for (const auto& parameter : parameters) parameter.mutable_grad() = parameter.detach() * 0.5 + 0.1;
}

inline void expect_equal(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) EXPECT_TRUE(at::equal(actual[i], expected[i])) << "parameter " << i;
}

inline void expect_close(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    EXPECT_TRUE(at::allclose(actual[i], expected[i], 1e-5, 1e-6)) << "parameter " << i;
  }
}

inline void train(torch::optim::Optimizer& optimizer, const std::vector<at::Tensor>& parameters, int steps) {
  for (int step = 0; step < steps; ++step) {
    fill_gradients(parameters);
    optimizer.step();
  }
}

}  // namespace lockstep::optim_parameters
