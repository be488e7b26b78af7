// Whether the memory of a tensor is what it means, as transports and loops over bytes take it. Internal to comm, nn,
// zero and dtensor.
#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep::detail {

/// What lies in memory are the tensor's values: nothing is left to be conjugated or negated on reading, and it is no
/// zero that has no memory at all.
inline bool holds_its_values(const at::Tensor& tensor) {
  return !tensor.is_conj() && !tensor.is_neg() && !tensor._is_zerotensor();
}

/// All of them, in order and in one piece. For dense tensors.
inline bool is_plain_memory(const at::Tensor& tensor) {
  return tensor.is_contiguous() && holds_its_values(tensor);
}

inline at::Tensor plain_copy(const at::Tensor& tensor) {
  return tensor.detach().clone(at::MemoryFormat::Contiguous);
}

/// `tensor` itself if it is plain.
inline at::Tensor as_plain_memory(const at::Tensor& tensor) {
  return is_plain_memory(tensor) ? tensor : plain_copy(tensor);
}

}  // namespace lockstep::detail
