#include "lockstep/nn/gradient_copy.h"

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/scalar_tensor.h>

#include <cstring>

#include "lockstep/comm/plain_memory.h"

namespace lockstep::detail {
namespace {

// Above, an operator's own threads and non-temporal stores are worth its call.
constexpr int64_t kSmallElements = 16 << 10;

/// Both lie in memory in the same order, without gaps.
bool have_same_layout(const at::Tensor& one, const at::Tensor& other) {
  if (one.is_contiguous() && other.is_contiguous()) return true;
  return one.strides() == other.strides() && one.is_non_overlapping_and_dense();
}

bool is_dense_on_cpu(const at::Tensor& tensor) {
  return tensor.device().is_cpu() && tensor.layout() == at::kStrided && holds_its_values(tensor);
}

bool can_loop(const at::Tensor& to, const at::Tensor& from) {
  return to.numel() <= kSmallElements && to.scalar_type() == from.scalar_type() && is_dense_on_cpu(to) &&
         is_dense_on_cpu(from) && to.sizes() == from.sizes() && have_same_layout(to, from);
}

template <class T>
void loop_scaled(const at::Tensor& to, const at::Tensor& from, double scale) {
  T* __restrict__ out = static_cast<T*>(to.mutable_data_ptr());
  const T* __restrict__ in = static_cast<const T*>(from.const_data_ptr());
  const auto factor = static_cast<T>(scale);
  const auto count = to.numel();
  for (int64_t i = 0; i < count; ++i) out[i] = in[i] * factor;
}

}  // namespace

void copy_scaled(const at::Tensor& to, const at::Tensor& from, double scale) {
  if (can_loop(to, from)) {
    if (to.scalar_type() == at::kFloat) return loop_scaled<float>(to, from, scale);
    if (to.scalar_type() == at::kDouble) return loop_scaled<double>(to, from, scale);
  }
  if (scale == 1) return copy_plain(to, from);
  auto out = to;
  if (from.sizes() == to.sizes() && from.itemsize() >= to.itemsize()) {
    // As a tensor without dims, a factor does not change the dtype of the product, which is rounded once.
    at::mul_out(out, from, at::scalar_tensor(scale, at::kDouble));
  } else {
    out.copy_(from).mul_(scale);
  }
}

void copy_plain(const at::Tensor& to, const at::Tensor& from) {
  if (can_loop(to, from)) {
    if (to.numel() > 0) std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), to.nbytes());
    return;
  }
  to.copy_(from);
}

void copy_all_scaled(const std::vector<at::Tensor>& to, const std::vector<at::Tensor>& from, const at::Tensor& buffer,
                     double scale) {
  if (!to.empty()) at::_foreach_copy_(to, from);
  if (scale != 1) buffer.mul_(scale);
}

}  // namespace lockstep::detail
