// Optimizers that step as soon as a parameter's gradient is there, so that gradients need not all exist at once.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

namespace torch::optim {
class Optimizer;
}

namespace lockstep {

using OptimizerPtr = std::shared_ptr<torch::optim::Optimizer>;
/// Makes an optimizer for these parameters:
///   [](auto parameters) { return std::make_shared<torch::optim::SGD>(parameters, 0.1); }
using OptimizerFactory = std::function<OptimizerPtr(std::vector<at::Tensor> parameters)>;

/// Gives each parameter an optimizer of its own that steps when backward has accumulated its gradient, and then drops
/// the gradient. May be called again: a parameter's optimizers step one after the other. A wrapper made around such
/// parameters steps after the reduction instead.
void apply_optimizer_in_backward(const OptimizerFactory& factory, const std::vector<at::Tensor>& parameters);

/// Takes the optimizers away again. They hold their parameters, and are held until then.
void remove_optimizers_in_backward(const std::vector<at::Tensor>& parameters);

/// The optimizers of these parameters, in the order of the parameters; for saving their state.
std::vector<OptimizerPtr> get_in_backward_optimizers(const std::vector<at::Tensor>& parameters);

namespace detail {

/// The optimizers of one parameter.
std::vector<OptimizerPtr> optimizers_in_backward_of(const at::Tensor& parameter);
/// Steps are somebody else's business from now on.
void release_backward_hooks(const at::Tensor& parameter);
/// Steps all of them with this gradient, which .grad holds only meanwhile.
void step_with_gradient(const std::vector<OptimizerPtr>& optimizers, const at::Tensor& parameter,
                        const at::Tensor& gradient);

}  // namespace detail
}  // namespace lockstep
