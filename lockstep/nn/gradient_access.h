// The one place where ddp/ reads and writes gradients. As a rule a gradient is the parameter's .grad; during a backward
// of distributed autograd it lives in that pass's context instead, and .grad must not be touched. CMake chooses the
// file behind it: a libtorch without RPC has no contexts.
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

/// Whether this thread is inside a context of distributed autograd: what it computes will as a rule have its backward
/// there. Reads a variable of the thread.
bool is_in_autograd_context();
/// Whether the backward this thread runs is one of distributed autograd. Anywhere in a backward.
bool is_context_backward();
/// Whether it is autograd::grad(), or backward() with chosen inputs.
bool is_partial_backward();

/// Where the gradients of one backward are. Cheap to copy.
class GradientAccess {
 public:
  /// Of the backward this thread runs: call it from a hook on an accumulator.
  static GradientAccess of_current_backward();
  /// There are no gradients, and what is written is dropped.
  static GradientAccess nowhere() {
    GradientAccess access;
    access.is_nowhere_ = true;
    return access;
  }

  /// Calls body(grad) with the gradient, undefined if there is none. If it returns true, the gradient becomes what
  /// `grad` then is; in a context it must be defined.
  template <class Body>
  void with_gradient(const at::Tensor& parameter, Body&& body) const {
    if (is_elsewhere()) return elsewhere(parameter, [&](at::Tensor& grad) { return body(grad); });
    body(parameter.mutable_grad());
  }

  bool is_in_context() const { return context_ != nullptr; }
  /// Not in .grad.
  bool is_elsewhere() const { return context_ || is_nowhere_; }
  bool is_same_place(const GradientAccess& other) const { return context_ == other.context_; }
  /// This backward has come to its end on all threads: a context may be given gradients it had none of.
  void settle() { is_settled_ = true; }

 private:
  friend class GradientPlace;
  void elsewhere(const at::Tensor& parameter, const std::function<bool(at::Tensor&)>& body) const;

  std::shared_ptr<torch::distributed::autograd::DistAutogradContext> context_;
  bool is_nowhere_ = false;
  bool is_settled_ = false;
};

/// Remembers where gradients are without keeping them: .grad, unless made otherwise.
class GradientPlace {
 public:
  GradientPlace() = default;
  explicit GradientPlace(const GradientAccess& access)
      : context_(access.context_), is_in_context_(access.is_in_context()) {}

  bool is_in_context() const { return is_in_context_; }
  /// Whether `access` leads there.
  bool is_of(const GradientAccess& access) const {
    return is_in_context_ == access.is_in_context() && (!is_in_context_ || context_.lock() == access.context_);
  }
  /// A context that was released.
  bool is_gone() const;
  /// If it is not gone.
  GradientAccess access() const;

 private:
  std::weak_ptr<torch::distributed::autograd::DistAutogradContext> context_;
  bool is_in_context_ = false;
};

}  // namespace lockstep::detail
