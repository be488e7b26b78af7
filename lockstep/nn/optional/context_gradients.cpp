// GradientAccess where libtorch has distributed autograd.
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/distributed/autograd/context/container.h>
#include <torch/csrc/distributed/autograd/context/context.h>

#include <algorithm>

#include "lockstep/nn/gradient_access.h"

namespace lockstep::detail {
namespace {

using torch::distributed::autograd::DistAutogradContainer;
using torch::distributed::autograd::ThreadLocalDistAutogradContext;

/// The nodes that a backward is restricted to; null if it is not.
const auto* chosen_nodes() {
  const auto* nodes = torch::autograd::get_current_graph_task_exec_info();
  return nodes != nullptr && !nodes->empty() ? nodes : nullptr;
}

}  // namespace

bool is_in_autograd_context() {
  return DistAutogradContainer::currentContextId() >= 0;
}

bool is_context_backward() {
  const auto* nodes = chosen_nodes();
  if (nodes == nullptr) return false;
  // The distributed engine captures what accumulators get, and has a hook on each. Nobody else has.
  const auto captures = std::find_if(nodes->begin(), nodes->end(), [](const auto& entry) {
    return entry.second.captures_ && !entry.second.captures_->empty();
  });
  return captures != nodes->end() &&
         !captures->second.captures_->front().DO_NOT_USE_DEPRECATED_get_capture_hooks().empty();
}

bool is_partial_backward() {
  return chosen_nodes() != nullptr && !is_context_backward();
}

GradientAccess GradientAccess::of_current_backward() {
  GradientAccess access;
  access.context_ = ThreadLocalDistAutogradContext::getContextPtr();
  return access;
}

void GradientAccess::elsewhere(const at::Tensor& parameter, const std::function<bool(at::Tensor&)>& body) const {
  at::Tensor grad;
  if (is_nowhere_) {
    body(grad);
    return;
  }
  if (is_settled_) {
    // The map itself: while gradients come it may be changed by any thread, and libtorch lends it under no lock.
    auto gradients = context_->getGradients();
    if (!gradients.contains(parameter)) {
      if (!body(grad)) return;
      gradients.insert(parameter, grad);
      // Again, so that readers on other streams wait for it.
      context_->runGradCallbackForVariable(parameter, [](at::Tensor&) { return true; });
      return;
    }
  }
  bool is_there = false;
  try {
    context_->runGradCallbackForVariable(parameter, [&](at::Tensor& kept) {
      is_there = true;
      return body(kept);
    });
  } catch (const c10::Error&) {
    // What libtorch asserts: it has no gradient of this parameter.
    if (is_there) throw;
  }
  if (is_there) return;
  const bool is_changed = body(grad);
  TORCH_INTERNAL_ASSERT(!is_changed, "a context is given a new gradient while its backward runs");
}

bool GradientPlace::is_gone() const {
  if (!is_in_context_) return false;
  const auto context = context_.lock();
  if (!context) return true;
  try {
    // The program may still hold what the container has let go of.
    DistAutogradContainer::getInstance().isValidContext(context->contextId());
    return false;
  } catch (const c10::Error&) {
    return true;
  }
}

GradientAccess GradientPlace::access() const {
  GradientAccess access;
  access.context_ = context_.lock();
  return access;
}

}  // namespace lockstep::detail
