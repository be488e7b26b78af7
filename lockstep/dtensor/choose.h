// Which of the ways that a rule offers an operator takes: per axis, the one that moves the fewest bytes. Internal to
// dtensor.
#pragma once

#include <vector>

#include "lockstep/dtensor/rule.h"

namespace lockstep::detail {

/// Placements for all axes, by operand and by result.
struct Chosen {
  std::vector<Placements> operands;
  std::vector<Placements> results;
};

/// Local: all ranks choose alike. Refuses, naming operator and placements, where no way keeps what is written in place
/// as it is.
Chosen choose(const RuleCall& call, const Plan& plan);

}  // namespace lockstep::detail
