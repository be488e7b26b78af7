#include "lockstep/shard/flat.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

namespace lockstep::detail {

at::Tensor row_of(const at::Tensor& parameter) {
  const auto memory = parameter.detach();
  if (!memory.is_non_overlapping_and_dense()) return {};
  return memory.as_strided({memory.numel()}, {1});
}

at::Tensor flattened_like(const at::Tensor& tensor, const at::Tensor& parameter) {
  TORCH_CHECK(tensor.sizes() == parameter.sizes(), "[lockstep/shard] a tensor of sizes ", tensor.sizes(),
              " does not fit a parameter of sizes ", parameter.sizes());
  return flattened_like(tensor, parameter.is_non_overlapping_and_dense() ? parameter.strides() : at::IntArrayRef());
}

at::Tensor flattened_like(const at::Tensor& tensor, at::IntArrayRef strides) {
  if (strides.empty()) return tensor.detach().contiguous().view({-1});
  if (tensor.strides() == strides) return row_of(tensor);
  const auto copy = at::empty_strided(tensor.sizes(), strides, tensor.options().requires_grad(false));
  return row_of(copy.copy_(tensor.detach()));
}

std::vector<int64_t> memory_order_of(const at::Tensor& parameter) {
  return parameter.is_non_overlapping_and_dense() ? parameter.strides().vec() : std::vector<int64_t>();
}

at::Tensor unflattened_like(const at::Tensor& row, const at::Tensor& parameter) {
  if (!parameter.is_non_overlapping_and_dense()) return row.view(parameter.sizes());
  return row.as_strided(parameter.sizes(), parameter.strides(), row.storage_offset());
}

at::Tensor with_own_storage(const at::Tensor& tensor) {
  return at::from_blob(
      tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(), [storage = tensor.storage()](void*) {},
      tensor.options().requires_grad(false));
}

at::Tensor part_of(const at::Tensor& row, const ElementRange& elements) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return row.narrow(0, elements.begin, elements.size());
}

}  // namespace lockstep::detail
