// What one rank does: the contenders take turns, and rank 0 prints what they took.
#pragma once

#include <string>
#include <vector>

#include "benchmarks/ddp/contender.h"

namespace lockstep::bench {

struct RankPlan {
  Case which = {};
  std::vector<std::string> contenders = {};
  double seconds = 1;  // for all of them together
};

/// Prints a line "sample NAME milliseconds" per step of the slowest rank, and a line "peak NAME bytes" if there is only
/// one contender.
void run_rank(const RankPlan& plan);

}  // namespace lockstep::bench
