// The product of a layer whose weight is cut, at once: on local tensors, with a backward in which the gradient of the
// input comes first, so that it can be reduced while the weight's is computed. Internal to tp.
#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep::detail {

/// Whether parallel_product() is for these: `weight`, of sizes [in, out], cut along `out` and an input that all ranks
/// hold; or cut along `in` and an input whose last dim is cut alike. Both are DTensors on a mesh of one axis.
bool is_parallel_product(const at::Tensor& input, const at::Tensor& weight);

struct ProductOptions {
  /// Backward gets an input that all ranks hold from a part on each, which it gathers: all that is kept until then.
  bool input_reshard = false;
};

/// input.matmul(weight): cut along its last dim, or terms. Differentiable, as often as needed. Nothing is sent.
at::Tensor parallel_product(const at::Tensor& input, const at::Tensor& weight, const ProductOptions& options = {});

}  // namespace lockstep::detail
