// Ways to train a replicated model with AdamW: who has the optimizer state, and who steps.
#pragma once

#include <string>

#include "benchmarks/kit/training_rank.h"

namespace lockstep::bench {

/// So that each but the last has a forward behind it.
inline constexpr int kStepsInARow = 4;

/// All with our DistributedDataParallel over the world's group. "lockstep": ZeroRedundancyOptimizer with
/// lockstep::optim::AdamW, divided by elements; "lockstep-parameters": divided by parameters; "lockstep-gradients":
/// gradients divided too; "lockstep-overlapped": divided by parameters, which arrive while the next forward runs.
/// "torch-adamw": torch::optim::AdamW, not divided.
///
/// Timed are "step", from zero_grad() to the end of the optimizer's step, and "optimizer-step" alone; and several steps
/// until all parameters are there, "steps-in-a-row". Counted are "state" and, for ours, "even-share": the state of an
/// optimizer that is not divided by the number of ranks; and with several ranks what tensors take beside the result
/// while it is collected: "consolidation" in chunks, "consolidation-bound" what that promises, "consolidation-at-once"
/// the plain way. Collective.
Contender make_contender(const std::string& name, const Case& which, const World& world);

}  // namespace lockstep::bench
