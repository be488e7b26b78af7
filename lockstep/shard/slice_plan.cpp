#include "lockstep/shard/slice_plan.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace lockstep {

ElementRange intersection(const ElementRange& one, const ElementRange& other) {
  const auto begin = std::max(one.begin, other.begin);
  return {begin, std::max(begin, std::min(one.end, other.end))};
}

ElementRange SlicePlan::slice_of(int rank) const {
  return {std::min(total, slice * rank), std::min(total, slice * (rank + 1))};
}

int SlicePlan::rank_of(int64_t element) const {
  return total == 0 ? 0 : static_cast<int>(std::min(element, total - 1) / slice);
}

SlicePlan plan_slices(int64_t total, int world_size, int64_t alignment) {
  TORCH_CHECK(total >= 0 && world_size > 0 && alignment > 0, "[lockstep/shard] cannot cut ", total, " elements for ",
              world_size, " ranks at multiples of ", alignment);
  const auto mean = (total + world_size - 1) / world_size;
  return {.total = total, .slice = (mean + alignment - 1) / alignment * alignment, .world_size = world_size};
}

}  // namespace lockstep
