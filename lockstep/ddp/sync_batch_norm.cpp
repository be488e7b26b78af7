#include "lockstep/ddp/sync_batch_norm.h"

#include <ATen/ops/batch_norm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <ostream>
#include <tuple>
#include <utility>

#include "lockstep/comm/world.h"
#include "lockstep/ddp/batch_statistics.h"
#include "lockstep/nn/functional_collectives.h"

namespace lockstep {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// A vector over channels, to be combined with tensors of the input's sizes.
at::Tensor per_channel(const at::Tensor& vector, const at::Tensor& input) {
  std::vector<int64_t> sizes(static_cast<std::size_t>(input.dim()), 1);
  sizes[1] = vector.numel();
  return vector.view(sizes);
}

/// Mean and inverse deviation as autograd sees them: functions of every rank's input.
std::pair<at::Tensor, at::Tensor> tracked_statistics(const at::Tensor& values, const at::Tensor& count, double eps,
                                                     const GroupPtr& group) {
  const auto dims = detail::all_dims_but_channels(values);
  const auto mean = functional::all_reduce(values.sum(dims), group) / count;
  const auto squares = (values - per_channel(mean, values)).pow(2).sum(dims);
  return {mean, at::rsqrt(functional::all_reduce(squares, group) / count + eps)};
}

struct Normalize : torch::autograd::Function<Normalize> {
  /// Without a weight or bias libtorch wants nothing, not an undefined tensor.
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const std::optional<at::Tensor>& given_weight, const std::optional<at::Tensor>& given_bias,
                            const at::Tensor& mean, const at::Tensor& inverse_deviation, const at::Tensor& count,
                            double eps, const GroupPtr& group) {
    const auto weight = given_weight.value_or(at::Tensor());
    const auto bias = given_bias.value_or(at::Tensor());
    context->save_for_backward({input, weight, mean, inverse_deviation, count});
    context->saved_data["eps"] = eps;
    context->saved_data["group"] = c10::IValue::make_capsule(group);
    context->saved_data["has_bias"] = bias.defined();
    const auto normal =
        (input.to(mean.scalar_type()) - per_channel(mean, input)) * per_channel(inverse_deviation, input);
    auto output = weight.defined() ? normal * per_channel(weight.to(mean.scalar_type()), input) : normal;
    if (bias.defined()) output = output + per_channel(bias.to(mean.scalar_type()), input);
    return output.to(input.options());
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const auto& input = saved[0];
    const auto& weight = saved[1];
    auto mean = saved[2];
    auto inverse_deviation = saved[3];
    const auto& count = saved[4];
    const auto group = c10::static_intrusive_pointer_cast<c10d::ProcessGroup>(context->saved_data["group"].toCapsule());
    const auto dims = detail::all_dims_but_channels(input);
    const auto values = input.to(mean.scalar_type());
    const auto gradient = gradients[0].to(mean.scalar_type());
    // Gradients of these gradients are asked for: then the statistics are no constants.
    if (at::GradMode::is_enabled()) {
      std::tie(mean, inverse_deviation) =
          tracked_statistics(values, count, context->saved_data["eps"].toDouble(), group);
    }
    const auto deviation = values - per_channel(mean, input);
    const auto sum = gradient.sum(dims);
    const auto sum_of_products = (gradient * deviation).sum(dims);
    // The loss of every rank depends on every rank's input, through the statistics.
    const auto sums = functional::all_reduce(at::cat({sum, sum_of_products}), group);
    const auto channels = input.size(1);
    const auto mean_gradient = sums.narrow(0, 0, channels) / count;
    const auto mean_product = sums.narrow(0, channels, channels) / count;
    auto scale = inverse_deviation;
    if (weight.defined()) scale = scale * weight.to(scale.scalar_type());
    const auto slope = mean_product * inverse_deviation * inverse_deviation;
    const auto input_gradient = (gradient - per_channel(mean_gradient, input) - deviation * per_channel(slope, input)) *
                                per_channel(scale, input);
    const auto weight_gradient =
        weight.defined() ? (sum_of_products * inverse_deviation).to(weight.scalar_type()) : at::Tensor();
    const auto bias_gradient = context->saved_data["has_bias"].toBool()
                                   ? sum.to(weight.defined() ? weight.scalar_type() : sum.scalar_type())
                                   : at::Tensor();
    return {input_gradient.to(input.options()), weight_gradient, bias_gradient, {}, {}, {}, {}, {}};
  }
};

}  // namespace

SyncBatchNormImpl::SyncBatchNormImpl(const torch::nn::BatchNormOptions& given, GroupPtr group)
    : options(given), process_group(std::move(group)) {
  SyncBatchNormImpl::reset();
}

SyncBatchNormImpl::SyncBatchNormImpl(const torch::nn::BatchNormOptions& given, GroupPtr group,
                                     const BatchNormTensors& tensors)
    : options(given), process_group(std::move(group)) {
  register_tensors(tensors);
}

void SyncBatchNormImpl::reset() {
  const auto features = options.num_features();
  BatchNormTensors tensors;
  if (options.affine()) {
    tensors.weight = at::empty({features}).requires_grad_();
    tensors.bias = at::empty({features}).requires_grad_();
  }
  if (options.track_running_stats()) {
    tensors.running_mean = at::zeros({features});
    tensors.running_var = at::ones({features});
    tensors.num_batches_tracked = at::zeros({}, at::kLong);
  }
  register_tensors(tensors);
  reset_parameters();
}

void SyncBatchNormImpl::register_tensors(const BatchNormTensors& tensors) {
  const auto parameter = [&](const char* name, const at::Tensor& tensor) {
    return register_parameter(name, tensor, tensor.defined() && tensor.requires_grad());
  };
  weight = parameter("weight", tensors.weight);
  bias = parameter("bias", tensors.bias);
  running_mean = register_buffer("running_mean", tensors.running_mean);
  running_var = register_buffer("running_var", tensors.running_var);
  num_batches_tracked = register_buffer("num_batches_tracked", tensors.num_batches_tracked);
}

void SyncBatchNormImpl::reset_running_stats() {
  if (!options.track_running_stats()) return;
  running_mean.zero_();
  running_var.fill_(1);
  num_batches_tracked.zero_();
}

void SyncBatchNormImpl::reset_parameters() {
  reset_running_stats();
  if (!options.affine()) return;
  const at::NoGradGuard no_grad;
  weight.fill_(1);
  bias.zero_();
}

void SyncBatchNormImpl::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha << "lockstep::SyncBatchNorm(" << options.num_features() << ", eps=" << options.eps()
         << ", momentum=";
  options.momentum() ? stream << *options.momentum() : stream << "None";
  stream << ", affine=" << options.affine() << ", track_running_stats=" << options.track_running_stats() << ")";
}

at::Tensor SyncBatchNormImpl::forward(const at::Tensor& input) {
  TORCH_CHECK(input.dim() >= 2, "[lockstep/ddp] SyncBatchNorm takes inputs of at least 2 dims, got ", input.dim());
  TORCH_CHECK(input.size(1) == options.num_features(), "[lockstep/ddp] SyncBatchNorm of ", options.num_features(),
              " features got an input with ", input.size(1), " channels");
  const bool uses_batch = is_training() || !running_mean.defined();
  // As in Python: in evaluation it is the plain layer, also without running statistics.
  const auto group = is_training() ? (process_group ? process_group : default_group()) : nullptr;
  const bool counts_batches = is_training() && num_batches_tracked.defined();
  if (counts_batches) num_batches_tracked += 1;
  if (!group || group->getSize() == 1) {
    double factor = options.momentum().value_or(0.0);
    if (counts_batches && !options.momentum()) factor = 1.0 / num_batches_tracked.item<double>();
    const bool updates = is_training();
    return at::batch_norm(input, weight, bias, updates || !uses_batch ? running_mean : at::Tensor(),
                          updates || !uses_batch ? running_var : at::Tensor(), uses_batch, factor, options.eps(),
                          /*cudnn_enabled=*/true);
  }
  detail::BatchStatistics statistics;
  {
    const at::NoGradGuard no_grad;
    statistics = detail::gather_statistics(input, group);
    if (is_training() && running_mean.defined()) update_running_stats(statistics);
  }
  const auto if_there = [](const at::Tensor& tensor) {
    return tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt;
  };
  return Normalize::apply(input, if_there(weight), if_there(bias), statistics.mean,
                          at::rsqrt(statistics.variance + options.eps()), statistics.count, options.eps(), group);
}

void SyncBatchNormImpl::update_running_stats(const detail::BatchStatistics& statistics) {
  const auto mean = statistics.mean.to(running_mean.scalar_type());
  const auto variance = statistics.variance.to(running_var.scalar_type());
  // One double: the share this batch has in the running statistics.
  auto factor = at::scalar_tensor(options.momentum().value_or(0.0), at::kDouble);
  if (!options.momentum() && num_batches_tracked.defined()) factor = num_batches_tracked.to(at::kDouble).reciprocal();
  const auto correction = statistics.count / (statistics.count - 1);
  if (mean.is_cpu()) {
    const auto share = factor.item<double>();
    running_mean.mul_(1 - share).add_(mean, share);
    running_var.mul_(1 - share).add_(variance, share * correction.item<double>());
    return;
  }
  // Where asking for the numbers would make the host wait for the device.
  running_mean.mul_(1 - factor).add_(mean * factor);
  running_var.mul_(1 - factor).add_(variance * (correction * factor));
}

}  // namespace lockstep
