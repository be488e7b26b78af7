// What rules of operators on shapes have in common. Internal to dtensor.
#pragma once

#include <ATen/core/ivalue.h>

#include <algorithm>
#include <cstdint>

#include "lockstep/dtensor/shape_map.h"
#include "lockstep/shard/layout.h"

namespace lockstep::detail {

/// Python's start and end, None or any number, as indices of a dim of `size`.
inline ElementRange slice_range(const c10::IValue& start, const c10::IValue& end, int64_t size) {
  const auto index = [size](const c10::IValue& value, int64_t none) {
    if (value.isNone()) return none;
    const auto given = value.toInt();
    return std::clamp(given < 0 ? given + size : given, int64_t{0}, size);
  };
  const auto begin = index(start, 0);
  return {begin, std::max(begin, index(end, size))};
}

/// Layout::local_sizes() in time that does not depend on split factors. REQUIRES: this rank is in the mesh.
inline TensorSizes local_sizes_in(const Layout& layout) {
  const auto& mesh = layout.mesh();
  return local_sizes_at(*mesh.get_coordinate(), mesh.shape(), layout.placements(), layout.sizes());
}

}  // namespace lockstep::detail
