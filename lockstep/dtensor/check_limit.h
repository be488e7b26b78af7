// Where a RedistributeLimit is held. Internal to dtensor.
#pragma once

#include "lockstep/dtensor/redistribute_plan.h"

namespace lockstep::detail {

/// Refuses, alike on all ranks, what is above the rank's lowest RedistributeLimit. Costs a load where there is none.
void check_limit(const RedistributePlan& plan, const Layout& from, const Placements& to, at::ScalarType dtype,
                 const PlanOptions& options);

}  // namespace lockstep::detail
