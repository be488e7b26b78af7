// How measurements travel from the processes that make them to the one that reports them: a line of text,
//   samples allreduce 26214400 zero-copy 0.0059 0.0061 …
// with seconds per call. mpi_collectives.c writes the same.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "benchmarks/collectives/plan.h"
#include "benchmarks/kit/report.h"

namespace lockstep::bench {

/// Seconds per call, by size and contender, for one operation and world.
using Measurements = std::map<std::pair<int64_t, std::string>, Samples>;

void print_samples(Operation operation, int64_t bytes, const std::string& contender, const Samples& seconds);

/// Adds the line's samples; other lines are ignored.
void take_samples(std::string_view line, Measurements& measurements);

}  // namespace lockstep::bench
