// Norms that Python has and libtorch's C++ modules lack: RMSNorm, and LayerNorm without a bias. Modules like libtorch's
// own, under Python's names.
//
//   lockstep::nn::RMSNorm norm(lockstep::nn::RMSNormOptions{.normalized_shape = {512}});
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <optional>
#include <ostream>
#include <vector>

namespace lockstep::nn {

struct RMSNormOptions {
  /// The last dims of the input, over which it is normalised.
  std::vector<int64_t> normalized_shape = {};
  /// Added to the mean square. By default the smallest number that makes a difference to 1 in the input's dtype.
  std::optional<double> eps = std::nullopt;
  /// With a weight, of ones at first.
  bool elementwise_affine = true;
};

class RMSNormImpl : public torch::nn::Cloneable<RMSNormImpl> {
 public:
  explicit RMSNormImpl(RMSNormOptions module_options);
  void reset() override;
  void reset_parameters();
  at::Tensor forward(const at::Tensor& input);
  void pretty_print(std::ostream& stream) const override;

  RMSNormOptions options;
  at::Tensor weight;  // undefined without elementwise_affine
};
TORCH_MODULE(RMSNorm);

struct LayerNormOptions {
  std::vector<int64_t> normalized_shape = {};
  double eps = 1e-5;
  bool elementwise_affine = true;
  /// Without it the module has a weight only, if elementwise_affine is on.
  bool bias = true;
};

class LayerNormImpl : public torch::nn::Cloneable<LayerNormImpl> {
 public:
  explicit LayerNormImpl(LayerNormOptions module_options);
  void reset() override;
  void reset_parameters();
  at::Tensor forward(const at::Tensor& input);
  void pretty_print(std::ostream& stream) const override;

  LayerNormOptions options;
  at::Tensor weight;  // undefined without elementwise_affine
  at::Tensor bias;    // undefined without either
};
TORCH_MODULE(LayerNorm);

}  // namespace lockstep::nn
