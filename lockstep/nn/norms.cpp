#include "lockstep/nn/norms.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/rms_norm.h>
#include <torch/nn/init.h>

#include <string>
#include <utility>

namespace lockstep::nn {
namespace {

/// Absent ones are registered too, as undefined tensors, so that code may ask for them by name.
at::Tensor registered(torch::nn::Module& module, const std::string& name, at::IntArrayRef sizes, bool is_there) {
  return module.register_parameter(name, is_there ? at::empty(sizes) : at::Tensor(), /*requires_grad=*/is_there);
}

}  // namespace

RMSNormImpl::RMSNormImpl(RMSNormOptions module_options) : options(std::move(module_options)) {
  RMSNormImpl::reset();
}

void RMSNormImpl::reset() {
  weight = registered(*this, "weight", options.normalized_shape, options.elementwise_affine);
  reset_parameters();
}

void RMSNormImpl::reset_parameters() {
  if (weight.defined()) torch::nn::init::ones_(weight);
}

at::Tensor RMSNormImpl::forward(const at::Tensor& input) {
  return at::rms_norm(input, options.normalized_shape, weight, options.eps);
}

void RMSNormImpl::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha << "lockstep::nn::RMSNorm(" << at::IntArrayRef(options.normalized_shape) << ", eps=";
  options.eps ? stream << *options.eps : stream << "None";
  stream << ", elementwise_affine=" << options.elementwise_affine << ")";
}

LayerNormImpl::LayerNormImpl(LayerNormOptions module_options) : options(std::move(module_options)) {
  LayerNormImpl::reset();
}

void LayerNormImpl::reset() {
  weight = registered(*this, "weight", options.normalized_shape, options.elementwise_affine);
  bias = registered(*this, "bias", options.normalized_shape, options.elementwise_affine && options.bias);
  reset_parameters();
}

void LayerNormImpl::reset_parameters() {
  if (weight.defined()) torch::nn::init::ones_(weight);
  if (bias.defined()) torch::nn::init::zeros_(bias);
}

at::Tensor LayerNormImpl::forward(const at::Tensor& input) {
  return at::layer_norm(input, options.normalized_shape, weight, bias, options.eps);
}

void LayerNormImpl::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha << "lockstep::nn::LayerNorm(" << at::IntArrayRef(options.normalized_shape)
         << ", eps=" << options.eps << ", elementwise_affine=" << options.elementwise_affine
         << ", bias=" << options.bias << ")";
}

}  // namespace lockstep::nn
