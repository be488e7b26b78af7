// From measurements to rows: what is compared with what, and what is meant to be reached.
#pragma once

#include <vector>

#include "benchmarks/collectives/samples_line.h"

namespace lockstep::bench {

/// The rows of one case, for those contenders and peers that were measured.
std::vector<Row> rows_of(Operation operation, int64_t bytes, int world_size, const Measurements& measurements);

}  // namespace lockstep::bench
