// Models, gradients and comparisons of the ZeRO tests.
#pragma once

#include <gtest/gtest.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <string>
#include <vector>

#include "lockstep/comm/barrier.h"
#include "lockstep/testing/gtest.h"
#include "lockstep/zero/zero_redundancy_optimizer.h"
#include "tests/support/ddp_models.h"

namespace lockstep::zero_fixtures {

/// Layers of the models that DDP trains here, and the rows of a batch.
inline const std::vector<int64_t> kSizes = {6, 40, 30, 20, 3};
inline constexpr int64_t kRows = 12;

inline torch::optim::AdamWOptions adamw() {
  return torch::optim::AdamWOptions(0.02).weight_decay(0.1);
}

/// Small buckets, so that there are several.
inline DdpOptions small_buckets() {
  return {.bucket_cap_mb = 0.002};
}

/// Of this rank's rows of the step's batch.
template <class Ddp>
at::Tensor loss_of(Ddp& ddp, const World& world, int step, int64_t columns = kSizes[0]) {
  using namespace ddp_models;
  return ddp(my_rows(random_batch(kRows, columns, 100 + step), world)).pow(2).mean();
}

/// Leaves of these sizes, the same on all ranks.
inline std::vector<at::Tensor> parameters_of(const std::vector<std::vector<int64_t>>& shapes, uint64_t seed = 3) {
  auto generator = at::detail::createCPUGenerator(seed);
  std::vector<at::Tensor> parameters;
  for (const auto& shape : shapes) {
    parameters.push_back(at::randn(shape, generator, at::TensorOptions(at::kFloat)).requires_grad_());
  }
  return parameters;
}

inline std::vector<at::Tensor> copies_of(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> copies;
  for (const auto& parameter : parameters) {
    copies.push_back(parameter.detach().clone().requires_grad_(parameter.requires_grad()));
  }
  return copies;
}

/// Gradients as DDP leaves them: the same on all ranks.
inline void set_gradients(const std::vector<at::Tensor>& parameters, uint64_t seed) {
  auto generator = at::detail::createCPUGenerator(seed);
  for (const auto& parameter : parameters) {
    const auto gradient = at::randn(parameter.sizes(), generator, at::TensorOptions(at::kFloat));
    parameter.mutable_grad() =
        parameter.requires_grad() ? at::empty_like(parameter.detach()).copy_(gradient) : at::Tensor();
  }
}

/// How far values may be apart, relative to 1 and to themselves.
struct Within {
  double tolerance = 0;  // none: bit by bit
};
/// The fused kernels round the last elements of a tensor, which do not fill a vector, differently from the others. So
/// slices of parameters, which end elsewhere, are not the same to the last bit.
inline constexpr Within kFusedSlices{1e-6};

inline bool agree(const at::Tensor& actual, const at::Tensor& expected, Within within) {
  if (within.tolerance == 0) return at::equal(actual, expected);
  return at::allclose(actual, expected, within.tolerance, within.tolerance);
}

inline void expect_same(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected,
                        const std::string& what = "", Within within = {}) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    EXPECT_TRUE(agree(actual[i], expected[i], within))
        << what << ", parameter " << i << " apart by " << (actual[i] - expected[i]).abs().max();
  }
}

/// Both optimizers take steps with the same gradients, and have the same parameters after each.
inline void expect_same_steps(torch::optim::Optimizer& optimizer, torch::optim::Optimizer& plain,
                              const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& expected,
                              int steps, const std::string& what = "") {
  for (int step = 0; step < steps; ++step) {
    set_gradients(parameters, step);
    set_gradients(expected, step);
    optimizer.step();
    plain.step();
    expect_same(parameters, expected, what + ", step " + std::to_string(step));
  }
}

inline void expect_same_values(const NamedValues& actual, const NamedValues& expected, const std::string& what,
                               Within within = {}) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  for (const auto& [name, value] : expected) {
    ASSERT_EQ(actual.count(name), 1U) << what << " has no " << name;
    const auto& other = actual.at(name);
    if (!value.isTensor()) {
      EXPECT_EQ(other, value) << what << ", " << name;
      continue;
    }
    ASSERT_EQ(other.toTensor().sizes(), value.toTensor().sizes()) << what << ", " << name;
    EXPECT_TRUE(agree(other.toTensor(), value.toTensor(), within)) << what << ", " << name;
  }
}

inline void expect_same_state(const OptimizerStateDict& actual, const OptimizerStateDict& expected,
                              Within within = {}) {
  ASSERT_EQ(actual.state.size(), expected.state.size());
  for (const auto& [index, values] : expected.state) {
    ASSERT_EQ(actual.state.count(index), 1U) << index;
    expect_same_values(actual.state.at(index), values, "state " + std::to_string(index), within);
  }
  ASSERT_EQ(actual.param_groups.size(), expected.param_groups.size());
  for (std::size_t i = 0; i < expected.param_groups.size(); ++i) {
    EXPECT_EQ(actual.param_groups[i].params, expected.param_groups[i].params);
    expect_same_values(actual.param_groups[i].options, expected.param_groups[i].options,
                       "options of group " + std::to_string(i));
  }
}

/// Runs `body` as 1 to 4 rank threads, on every backend for CPU tensors.
inline void on_ranks(const testing::RankBody& body, const std::vector<int>& world_sizes = {1, 2, 3, 4},
                     const std::vector<std::string>& backends = {"threads", "shm", "gloo"}) {
  for (const auto& backend : backends) {
    for (const int world_size : world_sizes) {
      SCOPED_TRACE(backend + " " + std::to_string(world_size));
      testing::run_threads_in_gtest({.world_size = world_size, .backend = backend}, [&](const World& world) {
        // No rank may leave while others still connect.
        barrier(world.group());
        body(world);
      });
    }
  }
}

/// The ways to divide parameters.
inline std::vector<std::pair<std::string, ZeroOptions>> ways(const GroupPtr& group) {
  return {{"parameters", {.process_group = group}},
          {"bucket views", {.process_group = group, .parameters_as_bucket_view = true}},
          {"elements", {.process_group = group, .partition = ZeroPartition::kElements}}};
}

}  // namespace lockstep::zero_fixtures
