// The one place where ddp/ reads and writes gradients. As a rule a gradient is the parameter's .grad; during a backward
// of distributed autograd it lives in that pass's context instead, and .grad must not be touched.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>

namespace torch::distributed::autograd {
class DistAutogradContext;
}

namespace lockstep::detail {

/// Whether this only stands in for a gradient that is divided among ranks and kept elsewhere: then there is nothing in
/// it to be averaged or scaled.
inline bool is_stand_in(const at::Tensor& gradient) {
  return gradient.defined() && gradient.layout() == at::kStrided && !gradient.has_storage();
}

/// Where the gradients of one backward are. Cheap to copy.
class GradientAccess {
 public:
  /// Of the backward this thread runs: call it from a gradient hook.
  static GradientAccess of_current_backward();

  /// Calls body(grad) with the gradient, undefined if there is none. If it returns true, the gradient becomes what
  /// `grad` then is.
  template <class Body>
  void with_gradient(const at::Tensor& parameter, Body&& body) const {
    if (context_) return in_context(parameter, [&](at::Tensor& grad) { return body(grad); });
    body(parameter.mutable_grad());
  }

  bool is_in_context() const { return context_ != nullptr; }

 private:
  void in_context(const at::Tensor& parameter, const std::function<bool(at::Tensor&)>& body) const;

  std::shared_ptr<torch::distributed::autograd::DistAutogradContext> context_;
};

}  // namespace lockstep::detail
