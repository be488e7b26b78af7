// Leaving out a step together: what GradScaler needs where ranks hold different gradients.
#pragma once

#include <functional>

#include "lockstep/comm/group.h"

namespace lockstep {

/// For GradScalerOptions::agree: if the gradients of one rank have overflowed, no rank steps. Collective.
std::function<void(at::Tensor& found_inf)> overflow_agreement(GroupPtr group);

}  // namespace lockstep
