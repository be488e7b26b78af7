#include "lockstep/optim/clip_grad.h"

#include <ATen/ops/_foreach_clamp_max.h>
#include <ATen/ops/_foreach_clamp_min.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <limits>

namespace lockstep {
namespace {

std::vector<at::Tensor> gradients_of(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : parameters) {
    if (const auto& gradient = parameter.grad(); gradient.defined()) gradients.push_back(gradient);
  }
  return gradients;
}

at::Tensor local_norm(const std::vector<at::Tensor>& tensors, const NormOptions& options) {
  if (tensors.empty()) return at::zeros({}, at::TensorOptions(options.device));
  std::vector<at::Tensor> norms;
  if (options.foreach) {
    norms = at::_foreach_norm(tensors, options.norm_type);
  } else {
    for (const auto& tensor : tensors) norms.push_back(at::linalg_vector_norm(tensor, options.norm_type));
  }
  for (auto& norm : norms) norm = norm.to(tensors.front().device());
  return at::linalg_vector_norm(at::stack(norms), options.norm_type);
}

/// The norm of a vector of which this rank has a part with that norm.
at::Tensor norm_over_shards(const at::Tensor& local, bool is_empty, const NormOptions& options) {
  const auto order = options.norm_type;
  // In double: powers of norms leave the range of float long before norms do.
  auto value = local.to(at::kDouble);
  // Such norms are of the smallest elements, and nothing has none.
  if (order < 0 && is_empty) value.fill_(std::numeric_limits<double>::infinity());
  if (std::isinf(order)) {
    options.over_shards(value, order > 0 ? ShardReduce::kMax : ShardReduce::kMin);
  } else if (order == 0) {
    options.over_shards(value, ShardReduce::kSum);
  } else {
    value = value.pow(order);
    options.over_shards(value, ShardReduce::kSum);
    value = value.pow(1 / order);
  }
  return value.to(local.scalar_type());
}

}  // namespace

at::Tensor get_total_norm(const std::vector<at::Tensor>& tensors, const NormOptions& options) {
  const at::NoGradGuard no_grad;
  auto norm = local_norm(tensors, options);
  if (options.over_shards) norm = norm_over_shards(norm, tensors.empty(), options);
  if (options.error_if_nonfinite) {
    TORCH_CHECK(norm.isfinite().item<bool>(), "[lockstep/optim] the norm of order ", options.norm_type,
                " of the gradients is ", norm.item<double>(),
                ", so they cannot be clipped. With error_if_nonfinite=false they are multiplied nevertheless.");
  }
  return norm;
}

void clip_grads_with_norm_(const std::vector<at::Tensor>& parameters, double max_norm, const at::Tensor& total_norm,
                           bool foreach) {
  scale_to_norm_(gradients_of(parameters), max_norm, total_norm, foreach);
}

void scale_to_norm_(const std::vector<at::Tensor>& gradients, double max_norm, const at::Tensor& total_norm,
                    bool foreach) {
  const at::NoGradGuard no_grad;
  if (gradients.empty()) return;
  // Never a question of the host to the device: multiplying by 1 is cheaper.
  const auto factor = total_norm.add(1e-6).reciprocal().mul(max_norm).clamp_max(1.0);
  if (foreach) return at::_foreach_mul_(gradients, factor.to(gradients.front().device()));
  for (const auto& gradient : gradients) gradient.mul_(factor.to(gradient.device()));
}

at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm, const NormOptions& options) {
  const auto norm = get_total_norm(gradients_of(parameters), options);
  clip_grads_with_norm_(parameters, max_norm, norm, options.foreach);
  return norm;
}

void clip_grad_value_(const std::vector<at::Tensor>& parameters, double clip_value, bool foreach) {
  const at::NoGradGuard no_grad;
  const auto gradients = gradients_of(parameters);
  if (gradients.empty()) return;
  if (foreach) {
    at::_foreach_clamp_min_(gradients, -clip_value);
    at::_foreach_clamp_max_(gradients, clip_value);
  } else {
    for (const auto& gradient : gradients) gradient.clamp_(-clip_value, clip_value);
  }
}

}  // namespace lockstep
