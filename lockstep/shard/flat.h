// Tensors as rows of their elements, in the order in which a parameter lies in memory: what flat buffers hold.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "lockstep/shard/slice_plan.h"

namespace lockstep::detail {

/// `tensor`, which has the parameter's sizes, as one row in the parameter's memory order; a copy only if it lies in
/// another one.
at::Tensor flattened_like(const at::Tensor& tensor, const at::Tensor& parameter);
/// The same for a parameter that lies in another order now: `strides` are those it had, empty if it had gaps.
at::Tensor flattened_like(const at::Tensor& tensor, at::IntArrayRef strides);
/// Its strides as flattened_like() takes them.
std::vector<int64_t> memory_order_of(const at::Tensor& parameter);
/// The opposite: `row` with the parameter's sizes and, if it is dense, strides. A view.
at::Tensor unflattened_like(const at::Tensor& row, const at::Tensor& parameter);
/// The parameter's own memory as one row, a view; undefined if it has gaps.
at::Tensor row_of(const at::Tensor& parameter);

/// The same memory, which it keeps, as a tensor with a storage of its own: owners and marks of `tensor`'s storage do
/// not know it.
at::Tensor with_own_storage(const at::Tensor& tensor);

/// Some elements of a row, as an alias that autograd does not track as a view: it may become a leaf of its own.
at::Tensor part_of(const at::Tensor& row, const ElementRange& elements);

}  // namespace lockstep::detail
