// Small modules for tests of single features: they have an ordinary forward and are sharded by the test.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include <optional>
#include <vector>

#include "lockstep/fsdp/fully_shard.h"

namespace lockstep::testing {

struct MLPOptions {
  bool bias = true;
  /// A buffer of random values that is added to the output.
  bool with_buffer = false;
  int64_t dim_multiplier = 4;
};

/// dim to a multiple of it and back, ReLU behind both.
class MLPImpl : public torch::nn::Module {
 public:
  explicit MLPImpl(int64_t dim, const MLPOptions& options = {});
  at::Tensor forward(const at::Tensor& input);
  /// Fills the buffer anew.
  void reset_parameters();

  torch::nn::Linear in_proj{nullptr};
  torch::nn::Linear out_proj{nullptr};
  at::Tensor buffer;  // undefined without one
};
TORCH_MODULE(MLP);

/// Three MLPs, the outer ones of three times the width, which is uneven on most meshes; maybe a LayerNorm without bias
/// behind them.
class MLPStackImpl : public torch::nn::Module {
 public:
  explicit MLPStackImpl(int64_t mlp_dim, bool with_seq_parallel = false);
  at::Tensor forward(const at::Tensor& input);

  /// Cuts the layers over `tp_mesh`, with DTensors between them; then every MLP becomes a unit, then the stack, which
  /// holds the LayerNorm.
  FsdpUnit parallelize(const std::optional<DeviceMesh>& tp_mesh, const DeviceMesh& dp_mesh,
                       bool use_activation_checkpointing, FullyShardOptions options = {});

  std::vector<MLP> mlps;
  torch::nn::LayerNorm norm{nullptr};  // null without one

 private:
  bool is_checkpointed_ = false;
};
TORCH_MODULE(MLPStack);

/// Two layers beside each other: two outputs, or one and a layer that nobody uses.
class DoubleLinearImpl : public torch::nn::Module {
 public:
  explicit DoubleLinearImpl(int64_t dim, bool use_second_linear = true);
  /// One tensor or two.
  std::vector<at::Tensor> forward(const at::Tensor& input);

  torch::nn::Linear lin1;
  torch::nn::Linear lin2;
  const bool use_second_linear;
};
TORCH_MODULE(DoubleLinear);

class SkipModuleImpl : public torch::nn::Module {
 public:
  SkipModuleImpl();
  at::Tensor forward(const at::Tensor& input);

  torch::nn::Linear lin;
};
TORCH_MODULE(SkipModule);

class NestedLinearImpl : public torch::nn::Module {
 public:
  NestedLinearImpl();
  at::Tensor forward(const at::Tensor& input);

  torch::nn::Linear nested_linear;
};
TORCH_MODULE(NestedLinear);

/// A layer, one that never is a unit, and one inside of another module.
class SkipModelImpl : public torch::nn::Module {
 public:
  SkipModelImpl();
  at::Tensor forward(const at::Tensor& input);
  /// Makes the module with a layer inside a unit, with `double_nest` that layer before it.
  void wrap(bool double_nest, const FullyShardOptions& options);

  torch::nn::Linear linear;
  SkipModule linear_skip;
  NestedLinear nested_linear;
};
TORCH_MODULE(SkipModel);

}  // namespace lockstep::testing
