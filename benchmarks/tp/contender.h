// What tensor parallelism and checkpointing are measured by. python_peer.py does the same.
#pragma once

#include <string>

#include "benchmarks/kit/training_rank.h"

namespace lockstep::bench {

/// How many checkpointed regions a "regions" step has.
inline constexpr int64_t kRegions = 300;

/// How many DTensor operations are timed together.
inline constexpr int64_t kCalls = 1000;

/// "ours", and "local" without any of it: steps of a transformer block under tensor parallelism and of small regions,
/// and DTensor operations. "deep" and "deep-local": a step of a deep model, for memory. Collective.
Contender make_contender(const std::string& name, const Case& which, const World& world);

}  // namespace lockstep::bench
