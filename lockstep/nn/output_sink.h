// An identity node between the module's outputs and the loss: through it the wrapper learns that backward has begun,
// and gradients of outputs the loss leaves out stay undefined instead of becoming zeros. Internal to the wrappers.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace lockstep::detail {

/// Passes the tensors through one node named "DdpSink". Those without a history come back as they are. `on_backward`
/// is called when its backward begins, and may throw. With `clones` the results may be changed in place.
std::vector<at::Tensor> pass_through_sink(const std::vector<at::Tensor>& tensors, bool clones,
                                          std::function<void()> on_backward);

}  // namespace lockstep::detail
