// The common case at the least cost: an operator that works element by element, on DTensors of one layout. Internal to
// dtensor.
#pragma once

#include "lockstep/intercept/operator_call.h"

namespace lockstep::detail {

/// Runs the operator on local tensors in their own places if all its DTensors have one layout without terms of sums,
/// and what else it gets are numbers. Else does nothing and returns false. REQUIRES: it works element by element.
bool run_elementwise(OperatorCall& call);

}  // namespace lockstep::detail
