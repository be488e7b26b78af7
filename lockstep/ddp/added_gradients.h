// Notices, in a Join scope, gradients that are added to averages nobody zeroed: ranks that mirror the backward cannot
// know of it. Internal to ddp.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "lockstep/ddp/reducer_setup.h"
#include "lockstep/nn/gradient_access.h"

namespace lockstep::detail {

class AddedGradients {
 public:
  /// Whether ranks may mirror the backwards to come.
  void watch(bool is_watched);
  /// A backward has left averages.
  void note_averages(const ReducerSetup& setup, const GradientAccess& access);
  /// The first gradient of the next one is there. Warns, once, if it was added to an average.
  void look_at(std::size_t parameter, const ReducerSetup& setup, const GradientAccess& access);

 private:
  /// A gradient by which it is known again.
  struct Average {
    const c10::TensorImpl* gradient = nullptr;
    int64_t version = 0;
  };

  bool is_watched_ = false;
  bool has_warned_ = false;
  std::vector<Average> averages_;  // by parameter, as the last backward left them
};

}  // namespace lockstep::detail
