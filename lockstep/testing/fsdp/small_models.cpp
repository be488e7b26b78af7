#include "lockstep/testing/fsdp/small_models.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/relu.h>

#include <utility>

#include "lockstep/checkpointing/checkpoint.h"
#include "lockstep/nn/module_access.h"
#include "lockstep/tp/parallelize_module.h"

namespace lockstep::testing {
namespace {

constexpr int64_t kSkipWidth = 10;

torch::nn::Linear linear_without_bias() {
  return torch::nn::Linear(torch::nn::LinearOptions(kSkipWidth, kSkipWidth).bias(false));
}

}  // namespace

MLPImpl::MLPImpl(int64_t dim, const MLPOptions& options) {
  const auto width = options.dim_multiplier * dim;
  in_proj = register_module("in_proj", torch::nn::Linear(torch::nn::LinearOptions(dim, width).bias(options.bias)));
  out_proj = register_module("out_proj", torch::nn::Linear(torch::nn::LinearOptions(width, dim).bias(options.bias)));
  if (options.with_buffer) buffer = register_buffer("buffer", at::randn({dim}));
}

at::Tensor MLPImpl::forward(const at::Tensor& input) {
  const auto output = at::relu(out_proj->forward(at::relu(in_proj->forward(input))));
  return buffer.defined() ? output + buffer : output;
}

void MLPImpl::reset_parameters() {
  if (buffer.defined()) buffer.normal_();
}

MLPStackImpl::MLPStackImpl(int64_t mlp_dim, bool with_seq_parallel) {
  for (const int64_t multiplier : {3, 4, 3}) {
    mlps.push_back(
        register_module(std::to_string(mlps.size()), MLP(mlp_dim, MLPOptions{.dim_multiplier = multiplier})));
  }
  if (!with_seq_parallel) return;
  norm = register_module("3", torch::nn::LayerNorm(torch::nn::LayerNormOptions({mlp_dim})));
  // libtorch's has no option for it: a bias that is not there is undefined.
  norm->bias.reset();
  lockstep::detail::ModuleAccess::parameters_of(*norm)["bias"].reset();
}

at::Tensor MLPStackImpl::forward(const at::Tensor& input) {
  auto output = input;
  // Ranks may be threads, which share the default generator; there is nothing random in it.
  const CheckpointOptions options{.preserve_rng_state = false};
  for (auto& mlp : mlps) output = is_checkpointed_ ? checkpoint(options, mlp, output) : mlp->forward(output);
  return norm ? norm->forward(output) : output;
}

FsdpUnit MLPStackImpl::parallelize(const std::optional<DeviceMesh>& tp_mesh, const DeviceMesh& dp_mesh,
                                   bool use_activation_checkpointing, FullyShardOptions options) {
  if (tp_mesh) {
    RowwiseOptions last;
    if (norm) last.output_layouts = Shard(1);
    ParallelPlan plan = {{"*.in_proj", ColwiseParallel({.use_local_output = false})},
                         {"[01].out_proj", RowwiseParallel({.use_local_output = false})},
                         {"2.out_proj", RowwiseParallel(last)}};
    if (norm) plan.emplace_back("3", SequenceParallel());
    parallelize_module(*this, *tp_mesh, plan);
  }
  is_checkpointed_ = use_activation_checkpointing;
  options.mesh = dp_mesh;
  for (auto& mlp : mlps) fully_shard(mlp, options);
  return fully_shard(*this, options);
}

DoubleLinearImpl::DoubleLinearImpl(int64_t dim, bool uses_second)
    : lin1(register_module("lin1", torch::nn::Linear(dim, dim))),
      lin2(register_module("lin2", torch::nn::Linear(dim, dim))),
      use_second_linear(uses_second) {}

std::vector<at::Tensor> DoubleLinearImpl::forward(const at::Tensor& input) {
  std::vector<at::Tensor> outputs{at::relu(lin1->forward(input))};
  if (use_second_linear) outputs.push_back(at::relu(lin2->forward(input)));
  return outputs;
}

SkipModuleImpl::SkipModuleImpl() : lin(register_module("lin", linear_without_bias())) {}

at::Tensor SkipModuleImpl::forward(const at::Tensor& input) {
  return lin->forward(input);
}

NestedLinearImpl::NestedLinearImpl() : nested_linear(register_module("nested_linear", linear_without_bias())) {}

at::Tensor NestedLinearImpl::forward(const at::Tensor& input) {
  return nested_linear->forward(input);
}

SkipModelImpl::SkipModelImpl()
    : linear(register_module("linear", linear_without_bias())),
      linear_skip(register_module("linear_skip", SkipModule())),
      nested_linear(register_module("nested_linear", NestedLinear())) {}

at::Tensor SkipModelImpl::forward(const at::Tensor& input) {
  return nested_linear->forward(linear_skip->forward(linear->forward(input)));
}

void SkipModelImpl::wrap(bool double_nest, const FullyShardOptions& options) {
  if (double_nest) fully_shard(nested_linear->nested_linear, options);
  fully_shard(nested_linear, options);
}

}  // namespace lockstep::testing
