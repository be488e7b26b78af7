#include "lockstep/ddp/gradient_witness.h"

#include <ATen/ops/any.h>
#include <ATen/ops/ne.h>
#include <c10/core/GradMode.h>

#include <algorithm>

#include "lockstep/nn/gradient_access.h"

namespace lockstep::detail {
namespace {

bool has_nonzero_gradient(const at::Tensor& parameter) {
  const auto& grad = parameter.grad();
  // A slice of earlier averages waits for nobody.
  if (!grad.defined() || is_stand_in(grad)) return false;
  const at::NoGradGuard no_grad;
  return at::any(at::ne(grad.is_sparse() ? grad._values() : grad, 0)).item<bool>();
}

}  // namespace

void GradientWitness::note(const std::vector<at::Tensor>& parameters) {
  const auto with_gradient = std::find_if(parameters.begin(), parameters.end(),
                                          [](const auto& parameter) { return parameter.grad().defined(); });
  if (with_gradient == parameters.end()) return;
  witness_ = with_gradient->grad().getIntrusivePtr();
  version_ = with_gradient->grad()._version();
}

bool GradientWitness::has_gradients(const std::vector<at::Tensor>& parameters) const {
  const auto witness = witness_.lock();
  for (const auto& parameter : parameters) {
    const auto& grad = parameter.grad();
    if (!grad.defined()) continue;
    if (witness && grad.unsafeGetTensorImpl() == witness.get() && grad._version() == version_) return true;
    break;  // the witness is the first one there was
  }
  return std::any_of(parameters.begin(), parameters.end(), has_nonzero_gradient);
}

}  // namespace lockstep::detail
