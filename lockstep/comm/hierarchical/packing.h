// Several tensors as one run of elements, and back: what stages that pass a buffer on work with. Internal to comm.
//
// One contiguous tensor is its own run and is not copied, so writing to the run writes to the tensor. Callers run below
// autograd.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace lockstep::detail {

/// The elements of the tensors, one tensor after the other.
at::Tensor pack(const std::vector<at::Tensor>& tensors);
/// A run of that size to write to; its content is undefined.
at::Tensor room_for(const std::vector<at::Tensor>& tensors);
/// Gives the tensors the run's elements, unless they have them already.
void unpack(const at::Tensor& run, const std::vector<at::Tensor>& tensors);

/// The same for tensors that hold `rows` equal pieces each: the run has row 0 of every tensor, then row 1 of every one
/// …
at::Tensor pack_rows(const std::vector<at::Tensor>& tensors, int64_t rows);
void unpack_rows(const at::Tensor& run, const std::vector<at::Tensor>& tensors, int64_t rows);

/// `run` as `count` equal rows; a run may be empty.
at::Tensor rows_of(const at::Tensor& run, int64_t count);

/// A contiguous tensor as a run of bytes, for transports that know few dtypes.
at::Tensor bytes_of(const at::Tensor& tensor);

}  // namespace lockstep::detail
