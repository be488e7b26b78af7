// Whether two tensors have an element in common, gaps counted out. Internal to zero.
#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep::detail {

/// From the first byte of a tensor's elements to behind the last one.
struct ByteRange {
  const char* begin = nullptr;
  const char* end = nullptr;
};
ByteRange bytes_spanned_by(const at::Tensor& tensor);

/// Neither may be empty. Exact, also for columns of one matrix, which lie in each other's gaps.
bool share_memory(const at::Tensor& one, const at::Tensor& other);

}  // namespace lockstep::detail
