#include "lockstep/optim/clip_grad.h"

#include <ATen/ops/_foreach_clamp_max.h>
#include <ATen/ops/_foreach_clamp_min.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/failure_notice.h"
#include "lockstep/comm/world.h"
#include "lockstep/state/optimizer_state.h"

namespace lockstep {
namespace {

std::vector<at::Tensor> gradients_of(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : parameters) {
    if (const auto& gradient = parameter.grad(); gradient.defined()) gradients.push_back(gradient);
  }
  return gradients;
}

/// What norms are computed of and factors are multiplied into.
at::Tensor dense_values_of(const at::Tensor& gradient) {
  return gradient.is_sparse() ? gradient._values() : gradient;
}

/// What a norm that was computed in another dtype is rounded to.
at::ScalarType real_dtype_of(const std::vector<at::Tensor>& gradients) {
  return norm_dtype_of(gradients).value_or(at::kFloat);
}

at::Tensor local_norm(const std::vector<at::Tensor>& tensors, const NormOptions& options) {
  if (tensors.empty()) return at::zeros({}, at::TensorOptions(options.device));
  std::vector<at::Tensor> values;
  values.reserve(tensors.size());
  // Rows that come several times count as their sum.
  for (const auto& tensor : tensors) values.push_back(dense_values_of(tensor.is_sparse() ? tensor.coalesce() : tensor));
  std::vector<at::Tensor> norms;
  // A CPU's kernel for lists casts copies of all tensors first: far more memory than one after the other.
  if (options.foreach && !(options.dtype && tensors.front().is_cpu())) {
    norms = at::_foreach_norm(values, options.norm_type, options.dtype);
  } else {
    for (const auto& each : values) {
      norms.push_back(at::linalg_vector_norm(each, options.norm_type, std::nullopt, /*keepdim=*/false, options.dtype));
    }
  }
  for (auto& norm : norms) norm = norm.to(tensors.front().device());
  return at::linalg_vector_norm(at::stack(norms), options.norm_type);
}

/// Norms of parts as they are put together to that of the whole, in double: powers of norms leave the range of float
/// long before norms do.
class NormOfParts {
 public:
  explicit NormOfParts(double order) : order_(order) {}

  /// What a part contributes.
  at::Tensor contribution(const at::Tensor& norm, bool is_empty, c10::Device device) const {
    auto value = norm.to(device, at::kDouble);
    // Norms of negative order are of the smallest elements, and where there is nothing there is none.
    if (order_ < 0 && is_empty) value = at::full_like(value, std::numeric_limits<double>::infinity());
    return has_powers() ? value.pow(order_) : value;
  }
  void reduce(at::Tensor& contribution, const GroupPtr& group) const {
    all_reduce(contribution, group, !std::isinf(order_) ? ReduceOp::SUM : order_ > 0 ? ReduceOp::MAX : ReduceOp::MIN);
  }
  at::Tensor combined(const at::Tensor& one, const at::Tensor& other) const {
    if (!std::isinf(order_)) return one + other;
    return order_ > 0 ? at::maximum(one, other) : at::minimum(one, other);
  }
  at::Tensor norm(const at::Tensor& contributions) const {
    return has_powers() ? contributions.pow(1 / order_) : contributions;
  }

 private:
  bool has_powers() const { return !std::isinf(order_) && order_ != 0; }

  const double order_;
};

void check_finite(const at::Tensor& norm, const NormOptions& options) {
  if (!options.error_if_nonfinite) return;
  TORCH_CHECK(norm.isfinite().item<bool>(), "[lockstep/optim] the norm of order ", options.norm_type,
              " of the gradients is ", norm.item<double>(),
              ", so they cannot be clipped. With error_if_nonfinite=false they are multiplied nevertheless.");
}

/// Kernels take lists on one device.
std::vector<std::vector<at::Tensor>> by_device(const std::vector<at::Tensor>& tensors) {
  std::vector<std::vector<at::Tensor>> lists;
  for (const auto& tensor : tensors) {
    const auto found = std::find_if(lists.begin(), lists.end(),
                                    [&](const auto& list) { return list.front().device() == tensor.device(); });
    (found == lists.end() ? lists.emplace_back() : *found).push_back(tensor);
  }
  return lists;
}

std::vector<at::Tensor> all_of(const std::vector<GradientShard>& shards) {
  std::vector<at::Tensor> gradients;
  for (const auto& shard : shards) gradients.insert(gradients.end(), shard.gradients.begin(), shard.gradients.end());
  return gradients;
}

void limit_values(const std::vector<at::Tensor>& gradients, double clip_value, bool foreach) {
  const at::NoGradGuard no_grad;
  if (!foreach) {
    for (const auto& gradient : gradients) gradient.clamp_(-clip_value, clip_value);
    return;
  }
  for (const auto& list : by_device(gradients)) {
    at::_foreach_clamp_min_(list, -clip_value);
    at::_foreach_clamp_max_(list, clip_value);
  }
}

}  // namespace

at::Tensor get_total_norm(const std::vector<at::Tensor>& tensors, const NormOptions& options) {
  auto of_shards = options;
  of_shards.process_group.reset();
  if (!tensors.empty()) of_shards.device = tensors.front().device();
  for (const auto& tensor : tensors) {
    if (const auto* stand_in = GradientStandIn::of(tensor)) stand_in->check_can_be_summed();
  }
  auto shards = shards_of_gradients(tensors);
  TORCH_CHECK(shards.size() == 1 || !options.process_group,
              "[lockstep/optim] some of these gradients are divided over groups of their own, which are known. Leave ",
              "NormOptions::process_group out.");
  if (options.process_group) {
    check_member(*options.process_group);
    shards.front().groups = {*options.process_group};
  } else if (shards.front().gradients.empty() && shards.size() > 1) {
    shards.erase(shards.begin());
  }
  return get_total_norm_of_shards(shards, of_shards);
}

at::Tensor get_total_norm_of_shards(const std::vector<GradientShard>& shards, const NormOptions& options) {
  const at::NoGradGuard no_grad;
  TORCH_CHECK(!options.process_group, "[lockstep/optim] these gradients come with the groups over which they are ",
              "divided. Leave NormOptions::process_group out.");
  at::Tensor norm;
  if (shards.size() == 1 && shards.front().groups.empty()) {
    // Without a detour through double, which would cost the last bit.
    norm = local_norm(shards.front().gradients, options);
    if (options.dtype && !shards.front().gradients.empty()) norm = norm.to(real_dtype_of(shards.front().gradients));
  } else {
    const NormOfParts parts(options.norm_type);
    at::Tensor total;
    auto dtype = at::kFloat;
    std::vector<at::Tensor> locals;
    try {
      for (const auto& shard : shards) locals.push_back(local_norm(shard.gradients, options));
    } catch (...) {
      // The other ranks would wait for this one's part.
      for (const auto& shard : shards) {
        for (const auto& group : shard.groups) announce_refusal(group, std::current_exception());
      }
      throw;
    }
    for (std::size_t i = 0; i < shards.size(); ++i) {
      const auto& shard = shards[i];
      const auto& local = locals[i];
      if (!shard.gradients.empty()) dtype = options.dtype ? real_dtype_of(shard.gradients) : local.scalar_type();
      auto contribution = parts.contribution(local, shard.gradients.empty(), options.device);
      for (const auto& group : shard.groups) parts.reduce(contribution, group);
      total = total.defined() ? parts.combined(total, contribution) : contribution;
    }
    dtype = options.result_dtype.value_or(dtype);
    norm = total.defined() ? parts.norm(total).to(dtype) : at::zeros({}, at::TensorOptions(options.device));
  }
  check_finite(norm, options);
  return norm;
}

void clip_grads_with_norm_(const std::vector<at::Tensor>& parameters, double max_norm, const at::Tensor& total_norm,
                           bool foreach) {
  scale_to_norm_(all_of(shards_of_gradients(gradients_of(parameters))), max_norm, total_norm, foreach);
}

void scale_to_norm_(const std::vector<at::Tensor>& gradients, double max_norm, const at::Tensor& total_norm,
                    bool foreach) {
  const at::NoGradGuard no_grad;
  if (gradients.empty()) return;
  // The host never asks the device whether there is something to clip: multiplying by 1 is cheaper than waiting.
  const auto factor = total_norm.add(1e-6).reciprocal().mul(max_norm).clamp_max(1.0);
  std::vector<at::Tensor> values;
  values.reserve(gradients.size());
  for (const auto& gradient : gradients) values.push_back(dense_values_of(gradient));
  if (!foreach) {
    for (const auto& each : values) each.mul_(factor.to(each.device()));
    return;
  }
  for (const auto& list : by_device(values)) at::_foreach_mul_(list, factor.to(list.front().device()));
}

at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm, const NormOptions& options) {
  auto shards = shards_by_layout(parameters);
  if (shards.size() > 1) {
    // Others' parts of these count too.
    if (shards.front().gradients.empty()) shards.erase(shards.begin());
    auto of_shards = options;
    of_shards.device = parameters.front().device();
    const auto norm = get_total_norm_of_shards(shards, of_shards);
    scale_to_norm_(all_of(shards), max_norm, norm, options.foreach);
    return norm;
  }
  const auto norm = get_total_norm(gradients_of(parameters), options);
  clip_grads_with_norm_(parameters, max_norm, norm, options.foreach);
  return norm;
}

at::Tensor clip_grad_norm_(torch::optim::Optimizer& optimizer, double max_norm, const NormOptions& options) {
  auto* sharded = dynamic_cast<ShardedGradients*>(&optimizer);
  if (sharded == nullptr) return clip_grad_norm_(optimized_parameters(optimizer), max_norm, options);
  auto of_shards = options;
  of_shards.device = sharded->gradient_device();
  if (!options.result_dtype) of_shards.result_dtype = norm_dtype_of(optimized_parameters(optimizer));
  const auto norm = get_total_norm_of_shards(sharded->gradients_for_norm(), of_shards);
  scale_to_norm_(all_of(sharded->own_gradients()), max_norm, norm, options.foreach);
  return norm;
}

void clip_grad_value_(const std::vector<at::Tensor>& parameters, double clip_value, bool foreach) {
  limit_values(all_of(shards_of_gradients(gradients_of(parameters))), clip_value, foreach);
}

void clip_grad_value_(torch::optim::Optimizer& optimizer, double clip_value, bool foreach) {
  auto* sharded = dynamic_cast<ShardedGradients*>(&optimizer);
  limit_values(sharded != nullptr ? all_of(sharded->own_gradients()) : gradients_of(optimized_parameters(optimizer)),
               clip_value, foreach);
}

}  // namespace lockstep
