// Ranges of elements, and one flat run of them divided evenly among ranks. Pure functions of sizes, so that all ranks
// come to the same result without a message.
#pragma once

#include <cstdint>

namespace lockstep {

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
