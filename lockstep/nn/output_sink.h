// An identity node between the module's outputs and the loss: gradients of outputs the loss leaves out stay undefined
// instead of becoming zeros. Internal to the wrappers.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace lockstep::detail {

/// Passes the tensors through one node named "DdpSink". Those without a history come back as they are. With `clones`
/// the results may be changed in place.
std::vector<at::Tensor> pass_through_sink(const std::vector<at::Tensor>& tensors, bool clones);

}  // namespace lockstep::detail
