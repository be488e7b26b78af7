// Models and helpers of the DDP tests.
#pragma once

#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include "lockstep/ddp/distributed_data_parallel.h"
#include "lockstep/ddp/engine.h"
#include "lockstep/lockstep.h"
#include "lockstep/testing/gtest.h"
#include "lockstep/testing/recorder.h"

namespace lockstep::ddp_models {

/// Linear layers one after the other: "layers.0", "layers.1", …
struct MlpImpl : torch::nn::Module {
  explicit MlpImpl(const std::vector<int64_t>& sizes) {
    for (std::size_t i = 0; i + 1 < sizes.size(); ++i) {
      layers.push_back(register_module("layer" + std::to_string(i), torch::nn::Linear(sizes[i], sizes[i + 1])));
    }
  }
  at::Tensor forward(at::Tensor input) {
    for (std::size_t i = 0; i < layers.size(); ++i) {
      input = layers[i]->forward(input);
      if (i + 1 < layers.size()) input = at::tanh(input);
    }
    return input;
  }
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Mlp);

/// Two branches of which a forward uses one, or both.
struct BranchyImpl : torch::nn::Module {
  BranchyImpl()
      : trunk(register_module("trunk", torch::nn::Linear(4, 4))),
        left(register_module("left", torch::nn::Linear(4, 2))),
        right(register_module("right", torch::nn::Linear(4, 2))) {}
  at::Tensor forward(const at::Tensor& input, bool uses_left, bool uses_right) {
    const auto hidden = at::tanh(trunk->forward(input));
    auto output = hidden.narrow(1, 0, 2);
    if (uses_left) output = output + left->forward(hidden);
    if (uses_right) output = output + right->forward(hidden);
    return output;
  }
  torch::nn::Linear trunk;
  torch::nn::Linear left;
  torch::nn::Linear right;
};
TORCH_MODULE(Branchy);

/// While one lives, what is told once is told always. The setting is the process's, and ranks may be threads.
class TellAlways {
 public:
  TellAlways() { add(1); }
  ~TellAlways() { add(-1); }
  TellAlways(const TellAlways&) = delete;
  TellAlways& operator=(const TellAlways&) = delete;

 private:
  static void add(int change) {
    static std::mutex mutex;
    static int count = 0;
    const std::lock_guard lock(mutex);
    count += change;
    c10::WarningUtils::set_warnAlways(count > 0);
  }
};

/// Keeps warnings instead of printing them, while it lives.
class Warnings : c10::WarningHandler {
 public:
  Warnings() : guard_(this) {}
  void process(const c10::Warning& warning) override { texts_.push_back(warning.msg()); }
  int count(const std::string& part) const {
    return static_cast<int>(std::count_if(texts_.begin(), texts_.end(),
                                          [&](const auto& text) { return text.find(part) != std::string::npos; }));
  }

 private:
  std::vector<std::string> texts_;
  const c10::WarningUtils::WarningHandlerGuard guard_;
  const TellAlways always_;
};

/// The same weights on all ranks and in all runs.
template <class M>
M seeded(M module, uint64_t seed = 7) {
  auto generator = at::detail::createCPUGenerator(seed);
  const at::NoGradGuard no_grad;
  for (auto& parameter : module->parameters()) parameter.normal_(0, 0.3, generator);
  return module;
}

inline Mlp mlp(const std::vector<int64_t>& sizes, uint64_t seed = 7) {
  return seeded(Mlp(sizes), seed);
}

inline at::Tensor random_batch(int64_t rows, int64_t columns, uint64_t seed) {
  return at::randn({rows, columns}, at::detail::createCPUGenerator(seed), at::TensorOptions(at::kFloat));
}

/// Rows of a whole batch that belong to this rank.
inline at::Tensor my_rows(const at::Tensor& whole, const World& world) {
  return whole.tensor_split(world.world_size())[world.rank()];
}

inline std::vector<at::Tensor> gradients_of(const torch::nn::Module& module) {
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : module.parameters()) {
    gradients.push_back(parameter.grad().defined() ? parameter.grad().clone() : at::Tensor());
  }
  return gradients;
}

inline void zero_grads(torch::nn::Module& module) {
  for (auto& parameter : module.parameters()) parameter.mutable_grad() = at::Tensor();
}

inline void expect_close(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected,
                         double tolerance = 1e-5) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    ASSERT_EQ(actual[i].defined(), expected[i].defined()) << "tensor " << i;
    if (!actual[i].defined()) continue;
    EXPECT_TRUE(at::allclose(actual[i], expected[i], tolerance, tolerance)) << "tensor " << i << "\n"
                                                                            << actual[i] << "\n"
                                                                            << expected[i];
  }
}

}  // namespace lockstep::ddp_models
