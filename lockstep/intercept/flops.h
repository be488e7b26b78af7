// Internal to intercept. Floating point operations of the operators that have most of them: products of matrices,
// convolutions, attention, forward and backward. A multiplication and an addition are two. Others count none, as in
// Python's FlopCounterMode.
#pragma once

#include <cstdint>

#include "lockstep/intercept/operator_call.h"

namespace lockstep::detail {

/// Counts before the operator runs, from the sizes of its arguments.
using CountFlops = std::int64_t (*)(const OperatorCall& call);

/// Null for operators that count none.
CountFlops flop_count_of(const c10::OperatorName& name);

}  // namespace lockstep::detail
