// Tells whether gradients that local backwards left in .grad are still waiting there, or were zeroed. Internal to ddp.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace lockstep::detail {

class GradientWitness {
 public:
  /// A backward has left gradients. Cheap.
  void note(const std::vector<at::Tensor>& parameters);
  /// Whether any is left of them. Looks at values only if they were changed since, and then waits for the device.
  bool has_gradients(const std::vector<at::Tensor>& parameters) const;

 private:
  // One gradient as it was left: while it is the same, none was zeroed.
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> witness_{
      c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};
  uint32_t version_ = 0;
};

}  // namespace lockstep::detail
