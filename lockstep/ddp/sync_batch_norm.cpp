#include "lockstep/ddp/sync_batch_norm.h"

#include <ATen/ops/batch_norm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/var_mean.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <ostream>
#include <tuple>
#include <utility>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/world.h"
#include "lockstep/nn/functional_collectives.h"

namespace lockstep {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Statistics and their gradients are computed in at least single precision.
at::ScalarType wide(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

std::vector<int64_t> all_dims_but_channels(const at::Tensor& input) {
  std::vector<int64_t> dims = {0};
  for (int64_t dim = 2; dim < input.dim(); ++dim) dims.push_back(dim);
  return dims;
}

/// A vector over channels, to be combined with tensors of the input's sizes.
at::Tensor per_channel(const at::Tensor& vector, const at::Tensor& input) {
  std::vector<int64_t> sizes(static_cast<std::size_t>(input.dim()), 1);
  sizes[1] = vector.numel();
  return vector.view(sizes);
}

struct Statistics {
  at::Tensor mean;
  at::Tensor variance;  // not corrected
  double count = 0;     // of values per channel, on all ranks together
};

/// Combined in rank order from each rank's mean and sum of squared deviations: the same bits on every rank, and no
/// cancellation as in a sum of squares.
Statistics gather_statistics(const at::Tensor& input, const GroupPtr& group) {
  const auto channels = input.size(1);
  const auto values = input.to(wide(input.scalar_type()));
  const auto own_count = static_cast<double>(channels == 0 ? 0 : input.numel() / channels);
  // In double: a count beyond 2^24 does not fit a float.
  auto mine = at::zeros({2 * channels + 1}, values.options().dtype(at::kDouble));
  if (own_count > 0) {
    const auto [variance, mean] = at::var_mean(values, all_dims_but_channels(input), /*correction=*/at::Scalar(0));
    mine.narrow(0, 0, channels).copy_(mean);
    mine.narrow(0, channels, channels).copy_(variance.to(at::kDouble).mul(own_count));
  }
  mine.narrow(0, 2 * channels, 1).fill_(own_count);
  const auto all = at::empty({group->getSize(), 2 * channels + 1}, mine.options());
  all_gather_into_tensor(all, mine, group);
  auto mean = at::zeros({channels}, mine.options());
  auto squares = at::zeros({channels}, mine.options());
  const auto counts = all.select(1, 2 * channels).cpu();
  double count = 0;
  for (int64_t rank = 0; rank < group->getSize(); ++rank) {
    const double theirs = counts[rank].item<double>();
    if (theirs == 0) continue;
    const auto delta = all[rank].narrow(0, 0, channels) - mean;
    const double together = count + theirs;
    mean = mean + delta * (theirs / together);
    squares = squares + all[rank].narrow(0, channels, channels) + delta * delta * (count * theirs / together);
    count = together;
  }
  const auto dtype = values.scalar_type();
  return {.mean = mean.to(dtype), .variance = (squares / std::max(count, 1.0)).to(dtype), .count = count};
}

/// Mean and inverse deviation as autograd sees them: functions of every rank's input.
std::pair<at::Tensor, at::Tensor> tracked_statistics(const at::Tensor& values, double count, double eps,
                                                     const GroupPtr& group) {
  const auto dims = all_dims_but_channels(values);
  const auto mean = functional::all_reduce(values.sum(dims), group) / count;
  const auto squares = (values - per_channel(mean, values)).pow(2).sum(dims);
  return {mean, at::rsqrt(functional::all_reduce(squares, group) / count + eps)};
}

struct Normalize : torch::autograd::Function<Normalize> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input, const at::Tensor& weight,
                            const at::Tensor& bias, const at::Tensor& mean, const at::Tensor& inverse_deviation,
                            double count, double eps, const GroupPtr& group) {
    context->save_for_backward({input, weight, mean, inverse_deviation});
    context->saved_data["count"] = count;
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
    const auto count = context->saved_data["count"].toDouble();
    const auto group = c10::static_intrusive_pointer_cast<c10d::ProcessGroup>(context->saved_data["group"].toCapsule());
    const auto dims = all_dims_but_channels(input);
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

void SyncBatchNormImpl::reset() {
  const auto features = options.num_features();
  weight = register_parameter("weight", options.affine() ? at::empty({features}) : at::Tensor(), options.affine());
  bias = register_parameter("bias", options.affine() ? at::empty({features}) : at::Tensor(), options.affine());
  const bool tracks = options.track_running_stats();
  running_mean = register_buffer("running_mean", tracks ? at::zeros({features}) : at::Tensor());
  running_var = register_buffer("running_var", tracks ? at::ones({features}) : at::Tensor());
  num_batches_tracked = register_buffer("num_batches_tracked", tracks ? at::zeros({}, at::kLong) : at::Tensor());
  reset_parameters();
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
  const auto group = uses_batch ? (process_group ? process_group : default_group()) : nullptr;
  double factor = options.momentum().value_or(0.0);
  if (is_training() && num_batches_tracked.defined()) {
    num_batches_tracked += 1;
    if (!options.momentum()) factor = 1.0 / static_cast<double>(num_batches_tracked.item<int64_t>());
  }
  if (!uses_batch || group->getSize() == 1) {
    const bool updates = is_training();
    return at::batch_norm(input, weight, bias, updates || !uses_batch ? running_mean : at::Tensor(),
                          updates || !uses_batch ? running_var : at::Tensor(), uses_batch, factor, options.eps(),
                          /*cudnn_enabled=*/true);
  }
  Statistics statistics;
  {
    const at::NoGradGuard no_grad;
    statistics = gather_statistics(input, group);
    TORCH_CHECK(statistics.count > 1, "[lockstep/ddp] SyncBatchNorm got ", statistics.count,
                " value per channel on all ranks together: it needs more than one to train");
    if (is_training() && running_mean.defined()) {
      const double correction = statistics.count / (statistics.count - 1);
      running_mean.mul_(1 - factor).add_(statistics.mean.to(running_mean.scalar_type()), factor);
      running_var.mul_(1 - factor).add_(statistics.variance.to(running_var.scalar_type()), factor * correction);
    }
  }
  return Normalize::apply(input, weight, bias, statistics.mean, at::rsqrt(statistics.variance + options.eps()),
                          statistics.count, options.eps(), group);
}

}  // namespace lockstep
