// Who gets what: parameters and elements divided among ranks. Pure functions of sizes, so that all ranks come to the
// same result without a message.
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

/// Elements in [begin, end).
struct ElementRange {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t size() const { return end - begin; }
  bool is_empty() const { return end <= begin; }
  bool operator==(const ElementRange&) const = default;
};

ElementRange intersection(const ElementRange& one, const ElementRange& other);

/// One flat run of `total` elements in equal slices, a multiple of `alignment` long: no slice is longer than the mean
/// by more than that.
struct SlicePlan {
  int64_t total = 0;
  int64_t slice = 0;
  int world_size = 1;

  /// What a buffer must hold: all slices, the last ones maybe beyond `total`.
  int64_t padded() const { return slice * world_size; }
  /// The elements of `rank`'s slice that exist.
  ElementRange slice_of(int rank) const;
  /// The rank whose slice `element` is in; of the element at the end of all, that of the last one.
  int rank_of(int64_t element) const;
};

SlicePlan plan_slices(int64_t total, int world_size, int64_t alignment);

}  // namespace lockstep
