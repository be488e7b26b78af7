// Copies of gradients into buckets and back. Most gradients of most models are small, and calling an operator costs
// more than moving them: those are moved by a loop here. Internal to the wrappers; callers run without grad mode.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace lockstep::detail {

/// to = from * scale, in one pass. Sizes are equal; dtypes may differ in precision.
void copy_scaled(const at::Tensor& to, const at::Tensor& from, double scale);

/// to = from.
void copy_plain(const at::Tensor& to, const at::Tensor& from);

/// Copies gradients to their views of `buffer` and multiplies all of it, in as few operations as the device needs.
void copy_all_scaled(const std::vector<at::Tensor>& to, const std::vector<at::Tensor>& from, const at::Tensor& buffer,
                     double scale);

}  // namespace lockstep::detail
