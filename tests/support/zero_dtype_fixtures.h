// Parameters of several dtypes, and what ZeRO's masters are compared with: one plain optimizer on copies.
#pragma once

#include <torch/nn/module.h>

#include <string>
#include <utility>
#include <vector>

#include "tests/support/zero_fixtures.h"

namespace lockstep::zero_dtype_fixtures {

/// Leaves whose dtypes go round; the same on all ranks. One has an order in memory of its own, some have few elements.
inline std::vector<at::Tensor> mixed_parameters(const std::vector<at::ScalarType>& dtypes, uint64_t seed = 3) {
  auto parameters = zero_fixtures::parameters_of({{7, 5}, {5}, {3, 4, 2}, {1}, {13}, {6, 9}, {2, 3}, {11}}, seed);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    auto values = parameters[i].detach().to(dtypes[i % dtypes.size()]);
    if (i == 5) values = values.t().contiguous().t();
    parameters[i] = values.requires_grad_();
  }
  return parameters;
}

inline const std::vector<at::ScalarType> kLowAndFull = {at::kBFloat16, at::kFloat, at::kHalf};

/// A plain optimizer on float copies of all parameters, which are rounded into them after each step.
template <class Optim>
class MasterReference {
 public:
  template <class Options>
  MasterReference(std::vector<at::Tensor> parameters, Options options)
      : parameters_(std::move(parameters)), masters_(copies(parameters_)), plain_(masters_, std::move(options)) {}

  void step() {
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < masters_.size(); ++i) {
      const auto& gradient = parameters_[i].grad();
      masters_[i].mutable_grad() = gradient.defined() ? gradient.to(at::kFloat) : at::Tensor();
    }
    plain_.step();
    for (std::size_t i = 0; i < masters_.size(); ++i) parameters_[i].detach().copy_(masters_[i]);
  }
  /// Masters take the parameters' values.
  void restart() {
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < masters_.size(); ++i) masters_[i].copy_(parameters_[i]);
  }

  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  const std::vector<at::Tensor>& masters() const { return masters_; }
  Optim& plain() { return plain_; }

 private:
  static std::vector<at::Tensor> copies(const std::vector<at::Tensor>& parameters) {
    std::vector<at::Tensor> all;
    for (const auto& each : parameters) {
      const auto copy = at::empty_like(each.detach(), each.options().dtype(at::kFloat).requires_grad(false));
      all.push_back(copy.copy_(each.detach()).requires_grad_(each.requires_grad()));
    }
    return all;
  }

  const std::vector<at::Tensor> parameters_;
  const std::vector<at::Tensor> masters_;
  Optim plain_;
};

/// Weights in bfloat16, biases in float; computes in float.
struct MixedMlpImpl : torch::nn::Module {
  explicit MixedMlpImpl(uint64_t seed = 7) {
    const auto values = zero_fixtures::parameters_of({{6, 40}, {40}, {40, 30}, {30}, {30, 3}, {3}}, seed);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const auto scaled = values[i].detach() * 0.2;
      weights.push_back(register_parameter("p" + std::to_string(i), i % 2 == 0 ? scaled.to(at::kBFloat16) : scaled));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (std::size_t i = 0; i < weights.size(); i += 2) {
      x = at::addmm(weights[i + 1], x, weights[i].to(at::kFloat));
      if (i + 2 < weights.size()) x = x.tanh();
    }
    return x;
  }
  std::vector<at::Tensor> weights;
};
TORCH_MODULE(MixedMlp);

}  // namespace lockstep::zero_dtype_fixtures
