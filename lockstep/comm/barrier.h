// A barrier that says who did not come.
#pragma once

#include <chrono>

#include "lockstep/comm/group.h"

namespace lockstep {

/// Blocks until every rank of `group` has called it. Collective. After `timeout` (zero: the group's) it throws
/// c10::DistBackendError naming the ranks that did not come; the group can then no longer be used.
void barrier(const GroupPtr& group = default_group(), std::chrono::milliseconds timeout = std::chrono::milliseconds(0));

}  // namespace lockstep
