// Who competes in the benchmark `graph`.
#pragma once

#include "benchmarks/kit/training_rank.h"

namespace lockstep::bench {

/// "eager": DDP as it is. "unsplit": its module compiled as one part. "split": cut where its buckets end.
/// "measured": DDP as it is, with the buckets that measure_plan() chose; "default": with its own.
Contender make_contender(const std::string& name, const Case& which, const World& world);

}  // namespace lockstep::bench
