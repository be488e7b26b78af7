// Looking indices of a cut dim up in the part that a rank holds: those of other ranks give zero there, so that the sum
// over the ranks is what the whole tensor gives. Internal to dtensor.
#pragma once

#include <ATen/core/Tensor.h>

#include "lockstep/shard/layout.h"

namespace lockstep::detail {

struct Positions {
  at::Tensor positions;  // in the rank's part; 0 for others' indices
  at::Tensor is_other;   // a mask
};

/// `indices` of dim `dim` in this rank's part of `layout`.
Positions positions_in_part(const at::Tensor& indices, const Layout& layout, int64_t dim);

}  // namespace lockstep::detail
