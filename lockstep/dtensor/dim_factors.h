// A dim's size as a product of factors, the outermost first, some of which a mesh axis divides: what stays the same
// when an operator changes the dims around them. Two tensors whose factors are the same hold the same elements on every
// rank, in the same order, whichever way the factors are grouped into dims. Pure. Internal to dtensor.
//
// [8] as Shard(0) over 2 ranks is 2 (divided) x 4 (free); as StridedShard(0, 4) it is 4 (free) x 2 (divided).
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "lockstep/shard/placement.h"

namespace lockstep {

/// A free factor is held by all; of a divided one each rank holds one index, if it is as large as the axis, or else a
/// chunk by the rule of Shard, of other length than the others'.
struct Factor {
  static constexpr int64_t kFree = -1;

  int64_t size = 1;
  int64_t axis = kFree;

  bool is_free() const { return axis == kFree; }
  bool operator==(const Factor&) const = default;
};

using Factors = std::vector<Factor>;

/// The factors of a dim of `size`. None if its cuts do not meet between factors, if it is cut raggedly or empty.
std::optional<Factors> factors_of(int64_t size, int64_t dim, const Placements& placements,
                                  const std::vector<int64_t>& mesh_shape);

/// Appends `more` further inside.
void append_factors(Factors& factors, const Factors& more);

/// The factors of dims of `sizes`, which hold as many elements. None if a divided factor would be torn.
std::optional<std::vector<Factors>> regrouped(Factors factors, const std::vector<int64_t>& sizes);

/// Sets the placements of the axes that divide `factors`, which are those of `dim`. False if no placements say so.
bool place(const Factors& factors, int64_t dim, const std::vector<int64_t>& mesh_shape, Placements& placements);

}  // namespace lockstep
