// The benchmark's work in one rank's process.
#pragma once

#include "benchmarks/collectives/plan.h"

namespace lockstep::bench {

/// Measures ours and gloo in turn, every operation and size of the plan once. Collective over the job. Rank 0 prints
/// samples lines.
void run_rank(const Plan& plan);

}  // namespace lockstep::bench
