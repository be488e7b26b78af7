// Tensors that are one rank's part of a larger one and look whole, as the gradients of shards do: their norm is this
// rank's only. A marked one refuses the operators by which programs, torch::nn::utils::clip_grad_norm_() among them,
// measure a whole tensor. All others cost nothing: the mark is a dispatch key of its own, where they have no kernel and
// the dispatcher does not look. Views, detach(), data() and set_data() inherit it. Local and thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep {

void mark_part(const at::Tensor& tensor);
/// Of a parameter: layers refuse to compute with it if it requires gradients, as the parameters of a cloned module do.
void mark_copy_of_part(const at::Tensor& tensor);

}  // namespace lockstep
