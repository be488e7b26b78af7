// The rules of programs(). Internal to testing.
#pragma once

#include <vector>

#include "lockstep/testing/combinations/covering.h"

namespace lockstep::testing::combinations {

std::vector<Rule> program_rules();

}  // namespace lockstep::testing::combinations
