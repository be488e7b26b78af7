// The seams between DTensors and ordinary tensors, and between placements, as autograd sees them. Internal to dtensor
// and tp.
#pragma once

#include <ATen/core/Tensor.h>

#include "lockstep/dtensor/dtensor.h"
#include "lockstep/dtensor/dtensor_impl.h"

namespace lockstep::detail {

/// The DTensor of which `local` is this rank's part. Its gradient is brought to `grad_placements` before it is
/// `local`'s.
at::Tensor wrap_differentiably(const at::Tensor& local, const LayoutPtr& layout, const Placements& grad_placements);

/// The same of a parameter: its gradient is marked as a part if it is one (intercept/part_mark.h).
at::Tensor wrap_parameter(const at::Tensor& leaf, const LayoutPtr& layout);

/// A handle on the local tensor of `dtensor`, whose gradient has `grad_placements`.
at::Tensor unwrap_differentiably(const at::Tensor& dtensor, const Placements& grad_placements);

/// `dtensor` itself if it has the placements.
at::Tensor redistribute_differentiably(const at::Tensor& dtensor, const Placements& placements,
                                       const RedistributeOptions& options);

}  // namespace lockstep::detail
