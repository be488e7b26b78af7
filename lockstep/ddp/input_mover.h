// Moves inputs to the module's device, beside what the device still computes. Internal to ddp.
#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep::detail {

/// `input` on `device`; the current stream may use it.
at::Tensor move_input(const at::Tensor& input, c10::Device device);

}  // namespace lockstep::detail
