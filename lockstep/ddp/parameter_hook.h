// Hooks on single gradients, for DdpOptions::per_parameter.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

namespace lockstep {

/// Called as hook(gradient, parameter), and changes the gradient in place. Several run one after the other.
using ParameterHook = std::function<void(at::Tensor& gradient, const at::Tensor& parameter)>;

}  // namespace lockstep
