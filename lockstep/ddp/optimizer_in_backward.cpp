#include "lockstep/ddp/optimizer_in_backward.h"

#include <c10/core/GradMode.h>
#include <torch/optim/optimizer.h>

#include <map>
#include <mutex>

#include "lockstep/nn/gradient_access.h"
#include "lockstep/nn/gradient_hooks.h"

namespace lockstep {
namespace {

struct Attached {
  std::vector<OptimizerPtr> optimizers;
  std::unique_ptr<detail::GradientHooks> hooks;
};

/// Tensors have no attributes to note it in.
struct Registry {
  std::mutex mutex;
  std::map<const c10::TensorImpl*, Attached> of_parameter;

  static Registry& instance() {
    static auto& registry = *new Registry;
    return registry;
  }
  /// With the lock held.
  Attached* find(const at::Tensor& parameter) {
    const auto found = of_parameter.find(parameter.unsafeGetTensorImpl());
    return found == of_parameter.end() ? nullptr : &found->second;
  }
};

}  // namespace

void apply_optimizer_in_backward(const OptimizerFactory& factory, const std::vector<at::Tensor>& parameters) {
  TORCH_CHECK(factory, "[lockstep/ddp] apply_optimizer_in_backward was given no factory");
  auto& registry = Registry::instance();
  for (const auto& parameter : parameters) {
    auto optimizer = factory({parameter});
    TORCH_CHECK(optimizer, "[lockstep/ddp] apply_optimizer_in_backward: the factory made no optimizer");
    const std::lock_guard lock(registry.mutex);
    auto& attached = registry.of_parameter[parameter.unsafeGetTensorImpl()];
    attached.optimizers.push_back(std::move(optimizer));
    if (attached.hooks) continue;
    attached.hooks = std::make_unique<detail::GradientHooks>();
    attached.hooks->add({parameter}, [parameter](std::size_t) {
      TORCH_CHECK(!detail::GradientAccess::of_current_backward().is_in_context(),
                  "[lockstep/ddp] an optimizer attached by apply_optimizer_in_backward steps with .grad, but in a ",
                  "context of distributed autograd gradients are in the context. Take it away by ",
                  "remove_optimizers_in_backward(), and step after backward with the context's gradients.");
      if (!parameter.grad().defined()) return;
      detail::step_with_gradient(detail::optimizers_in_backward_of(parameter), parameter, parameter.grad());
    });
  }
}

void remove_optimizers_in_backward(const std::vector<at::Tensor>& parameters) {
  auto& registry = Registry::instance();
  std::vector<Attached> dropped;  // not under the lock: a parameter may go with its last optimizer
  const std::lock_guard lock(registry.mutex);
  for (const auto& parameter : parameters) {
    const auto found = registry.of_parameter.find(parameter.unsafeGetTensorImpl());
    if (found == registry.of_parameter.end()) continue;
    dropped.push_back(std::move(found->second));
    registry.of_parameter.erase(found);
  }
}

std::vector<OptimizerPtr> get_in_backward_optimizers(const std::vector<at::Tensor>& parameters) {
  std::vector<OptimizerPtr> result;
  for (const auto& parameter : parameters) {
    for (auto& optimizer : detail::optimizers_in_backward_of(parameter)) result.push_back(std::move(optimizer));
  }
  return result;
}

namespace detail {

std::vector<OptimizerPtr> optimizers_in_backward_of(const at::Tensor& parameter) {
  auto& registry = Registry::instance();
  const std::lock_guard lock(registry.mutex);
  const auto* attached = registry.find(parameter);
  return attached != nullptr ? attached->optimizers : std::vector<OptimizerPtr>();
}

void release_backward_hooks(const at::Tensor& parameter) {
  auto& registry = Registry::instance();
  const std::lock_guard lock(registry.mutex);
  if (auto* attached = registry.find(parameter)) attached->hooks->remove();
}

void step_with_gradient(const std::vector<OptimizerPtr>& optimizers, const at::Tensor& parameter,
                        const at::Tensor& gradient) {
  parameter.mutable_grad() = gradient;
  for (const auto& optimizer : optimizers) optimizer->step();
  parameter.mutable_grad() = at::Tensor();
}

}  // namespace detail
}  // namespace lockstep
