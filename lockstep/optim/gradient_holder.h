// For optimizers whose gradients are not all in their parameters' .grad, so that GradScaler finds them.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace lockstep {

class GradientHolder {
 public:
  virtual ~GradientHolder() = default;

  /// The gradients that the optimizer's next step uses on this rank, to be changed in place.
  virtual std::vector<at::Tensor> held_gradients() = 0;
};

}  // namespace lockstep
