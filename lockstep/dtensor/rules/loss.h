// Losses over classes that are cut among ranks. Internal to dtensor and tp.
#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep::detail {

/// How many LossParallel scopes the thread has open: inside of one, log_softmax leaves a cut dim cut.
int& loss_parallel_depth();

/// The gradient of nll_loss is known to every rank summed over all classes, though each holds some of them only: the
/// backward of log_softmax needs just this sum, and finds it here instead of asking the others. By local tensor; one
/// that was changed, or added to, is not found.
void remember_class_sums(const at::Tensor& gradient, at::Tensor sums);
/// Undefined if there is none. Forgets it.
at::Tensor take_class_sums(const at::Tensor& gradient);

}  // namespace lockstep::detail
