// Plans as any rank of the mesh has them, and the geometry of their steps. Internal to dtensor.
#pragma once

#include "lockstep/dtensor/redistribute_plan.h"

namespace lockstep::detail {

/// The plan of the rank at `coordinate`. Pure. REQUIRES: moves that are not refused, dims counted from the front.
RedistributePlan plan_at(const std::vector<int>& coordinate, const Layout& from, const Placements& to,
                         int64_t element_bytes);

/// What the axis's `rank` holds of a tensor of step.sizes under `placement`, which is the step's `from` or `to`.
TensorPart part_of_step(const RedistributeStep& step, const Placement& placement, int rank);

}  // namespace lockstep::detail
