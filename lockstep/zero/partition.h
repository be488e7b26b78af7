// Who gets which whole parameters. Pure functions of sizes, so that all ranks come to the same result without a
// message. Elements are divided in lockstep/shard/slice_plan.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lockstep {

/// How ZeroRedundancyOptimizer divides the parameters.
enum class ZeroPartition {
  /// Whole parameters, the largest first, each to the rank with the least.
  kParameters,
  /// An equal slice of all elements to each rank; a slice begins and ends within parameters.
  kElements,
};

/// The lowest position with the smallest load among those not barred. `barred` is empty or as long as `loads`. Throws
/// if all are barred.
std::size_t least_loaded(const std::vector<int64_t>& loads, const std::vector<bool>& barred = {});

/// By rank and group: positions within the group, in the order in which they were given out.
using PositionsPerRank = std::vector<std::vector<std::vector<std::size_t>>>;

/// Python's sorted greedy partition. Group by group, parameters by descending size (equal ones in their order) go to
/// the least loaded rank, and loads carry over from group to group.
PositionsPerRank partition_by_size(const std::vector<std::vector<int64_t>>& sizes_per_group, int world_size);

}  // namespace lockstep
