// GradientAccess where libtorch was built without RPC: there are no contexts.
#include <torch/csrc/autograd/graph_task.h>

#include "lockstep/nn/gradient_access.h"

namespace lockstep::detail {

bool is_in_autograd_context() {
  return false;
}

bool is_context_backward() {
  return false;
}

bool is_partial_backward() {
  const auto* nodes = torch::autograd::get_current_graph_task_exec_info();
  return nodes != nullptr && !nodes->empty();
}

GradientAccess GradientAccess::of_current_backward() {
  return {};
}

void GradientAccess::elsewhere(const at::Tensor& /*parameter*/, const std::function<bool(at::Tensor&)>& body) const {
  at::Tensor grad;
  body(grad);
}

bool GradientPlace::is_gone() const {
  return false;
}

GradientAccess GradientPlace::access() const {
  return {};
}

}  // namespace lockstep::detail
