#include "lockstep/intercept/flops.h"

#include <functional>
#include <numeric>
#include <string>
#include <unordered_map>

namespace lockstep::detail {
namespace {

std::int64_t product(c10::IntArrayRef sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{1}, std::multiplies<>());
}

const at::Tensor& tensor(const OperatorCall& call, std::size_t index) {
  return call.argument(index).toTensor();
}

std::int64_t of_product(const at::Tensor& left, const at::Tensor& right) {
  // Every element of `left` meets every column of `right`.
  if (right.dim() < 2 || left.dim() == 0) return 2 * left.numel();
  return 2 * left.numel() * right.size(-1);
}

template <std::size_t kLeft>
std::int64_t of_products(const OperatorCall& call) {
  return of_product(tensor(call, kLeft), tensor(call, kLeft + 1));
}

std::int64_t of_linear(const OperatorCall& call) {
  const auto& weight = tensor(call, 1);
  return 2 * tensor(call, 0).numel() * (weight.dim() > 1 ? weight.size(0) : 1);
}

std::int64_t extent_after(std::int64_t size, std::int64_t kernel, std::int64_t stride, std::int64_t padding,
                          std::int64_t dilation) {
  return (size + 2 * padding - dilation * (kernel - 1) - 1) / stride + 1;
}

/// Each place of the smaller-grained side meets the whole kernel: outputs of a convolution, inputs of a transposed one.
std::int64_t of_places(std::int64_t batch, std::int64_t places, const at::Tensor& weight) {
  return 2 * batch * places * weight.numel();
}

std::int64_t of_convolution(const OperatorCall& call) {
  // input, weight, bias, stride, padding, dilation, transposed, …
  const auto& input = tensor(call, 0);
  const auto& weight = tensor(call, 1);
  const auto spatial = input.sizes().slice(2);
  if (call.argument(6).toBool()) return of_places(input.size(0), product(spatial), weight);
  const auto at = [&](std::size_t argument, std::size_t dim) {
    const auto values = call.argument(argument).toIntVector();
    return values[values.size() == 1 ? 0 : dim];
  };
  std::int64_t places = 1;
  for (std::size_t dim = 0; dim < spatial.size(); ++dim) {
    places *=
        extent_after(spatial[dim], weight.size(static_cast<std::int64_t>(dim) + 2), at(3, dim), at(4, dim), at(5, dim));
  }
  return of_places(input.size(0), places, weight);
}

/// grad_output, input, weight, (bias_sizes,) stride, padding, dilation, transposed, output_padding, groups, output_mask
template <std::size_t kTransposed>
std::int64_t of_convolution_backward(const OperatorCall& call) {
  const auto& grad = tensor(call, 0);
  const auto& input = tensor(call, 1);
  const auto& places_of = call.argument(kTransposed).toBool() ? input : grad;
  const auto once = of_places(input.size(0), product(places_of.sizes().slice(2)), tensor(call, 2));
  const auto mask = call.argument(kTransposed + 3).toBoolList();
  return once * (static_cast<std::int64_t>(mask.get(0)) + static_cast<std::int64_t>(mask.get(1)));
}

/// Queries meet keys, and the weights meet values: the two products of attention.
std::int64_t of_attention_of(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
  return 2 * query.numel() * key.size(-2) + 2 * (query.numel() / query.size(-1)) * key.size(-2) * value.size(-1);
}

std::int64_t of_attention(const OperatorCall& call) {
  return of_attention_of(tensor(call, 0), tensor(call, 1), tensor(call, 2));
}

/// The scores again, and two products for each of the two of forward: five instead of two.
std::int64_t of_attention_backward(const OperatorCall& call) {
  const auto& query = tensor(call, 1);
  const auto& key = tensor(call, 2);
  const auto& value = tensor(call, 3);
  const auto scores = 2 * query.numel() * key.size(-2);
  return scores + 2 * of_attention_of(query, key, value);
}

const std::unordered_map<std::string, CountFlops>& table() {
  static const std::unordered_map<std::string, CountFlops> counts = {
      {"aten::mm", of_products<0>},
      {"aten::bmm", of_products<0>},
      {"aten::mv", of_products<0>},
      {"aten::dot", of_products<0>},
      {"aten::vdot", of_products<0>},
      {"aten::matmul", of_products<0>},
      {"aten::_int_mm", of_products<0>},
      {"aten::_scaled_mm", of_products<0>},
      {"aten::addmm", of_products<1>},
      {"aten::addmm_", of_products<1>},
      {"aten::_addmm_activation", of_products<1>},
      {"aten::addmv", of_products<1>},
      {"aten::addmv_", of_products<1>},
      {"aten::baddbmm", of_products<1>},
      {"aten::baddbmm_", of_products<1>},
      {"aten::addbmm", of_products<1>},
      {"aten::addbmm_", of_products<1>},
      {"aten::linear", of_linear},
      {"aten::mkldnn_linear", of_linear},
      {"mkldnn::_linear_pointwise", of_linear},
      {"aten::convolution", of_convolution},
      {"aten::_convolution", of_convolution},
      {"aten::convolution_overrideable", of_convolution},
      {"aten::convolution_backward", of_convolution_backward<7>},
      {"aten::convolution_backward_overrideable", of_convolution_backward<6>},
      {"aten::scaled_dot_product_attention", of_attention},
      {"aten::_scaled_dot_product_flash_attention", of_attention},
      {"aten::_scaled_dot_product_flash_attention_for_cpu", of_attention},
      {"aten::_scaled_dot_product_efficient_attention", of_attention},
      {"aten::_scaled_dot_product_cudnn_attention", of_attention},
      {"aten::_scaled_dot_product_flash_attention_backward", of_attention_backward},
      {"aten::_scaled_dot_product_flash_attention_for_cpu_backward", of_attention_backward},
      {"aten::_scaled_dot_product_efficient_attention_backward", of_attention_backward},
      {"aten::_scaled_dot_product_cudnn_attention_backward", of_attention_backward},
  };
  return counts;
}

}  // namespace

CountFlops flop_count_of(const c10::OperatorName& name) {
  const auto found = table().find(name.name);
  return found != table().end() ? found->second : nullptr;
}

}  // namespace lockstep::detail
