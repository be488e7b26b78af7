// Internal to the library. Runs an operator on tensors without memory, for the geometry of its results alone.
#pragma once

#include <ATen/core/stack.h>

#include "lockstep/intercept/operator_call.h"

namespace lockstep::detail {

/// The results of the call if every tensor and device is meta. Tensors on meta among the arguments are passed as they
/// are, so in-place operators return them; others are replaced. `moves` makes aten::to copy even to the same device.
/// Throws an error that begins with `who` and names the operator if it needs values, which ends with `remedy`, or
/// fails.
torch::jit::Stack run_for_shapes(const OperatorCall& call, bool moves, const char* who, const char* remedy);

/// Whether it draws random numbers.
bool is_random(const c10::OperatorHandle& op);

}  // namespace lockstep::detail
