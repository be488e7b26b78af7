#include "lockstep/nn/gradient_access.h"

#include <torch/csrc/distributed/autograd/context/context.h>

namespace lockstep::detail {

GradientAccess GradientAccess::of_current_backward() {
  GradientAccess access;
  access.context_ = torch::distributed::autograd::ThreadLocalDistAutogradContext::getContextPtr();
  return access;
}

void GradientAccess::in_context(const at::Tensor& parameter, const std::function<bool(at::Tensor&)>& body) const {
  context_->runGradCallbackForVariable(parameter, body);
}

}  // namespace lockstep::detail
