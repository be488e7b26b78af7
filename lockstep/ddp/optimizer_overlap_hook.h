// A hook that is followed by the optimizer's step, bucket by bucket, while backward still computes others.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "lockstep/ddp/comm_hook.h"

namespace lockstep {

/// Changes `parameter` by its averaged gradient; runs without grad mode, one call at a time, on any thread.
using StepParameter = std::function<void(const at::Tensor& parameter, const at::Tensor& gradient)>;

/// Python's _hook_then_optimizer: as `hook`, and when a bucket's gradients are there, `step` is called for each of its
/// parameters; for those in `parameters` only, if given. Parameters with sparse gradients get them as they are.
CommHook hook_then_optimizer(const CommHook& hook, StepParameter step,
                             const std::optional<std::vector<at::Tensor>>& parameters = std::nullopt);

}  // namespace lockstep
