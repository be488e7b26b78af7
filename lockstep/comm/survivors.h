// Going on without those who died: the ranks that are left of a failed group agree on who they are and make a group of
// their own. See docs/comm.md, "Going on with those who are left".
#pragma once

#include <chrono>
#include <vector>

#include "lockstep/comm/group.h"

namespace lockstep {

struct SurvivorOptions {
  /// How long to wait for ranks that may only be late. A process of this host that ended is not waited for.
  std::chrono::milliseconds patience = std::chrono::seconds(30);
  /// Fewer than these cannot go on: all of them throw.
  int at_least = 1;
};

/// A group of the ranks of `failed` that are left, in their old order. Called by all of them after an operation of
/// `failed` threw c10::DistBackendError; whoever is alive comes to it that way. Ranks that come when the others have
/// agreed without them throw. Collective over the survivors. Needs a store that has not died with its rank: see
/// lockstep-run --survivors.
GroupPtr surviving_group(const GroupPtr& failed, const SurvivorOptions& options = {});

/// Ranks in the world of those that `before` had and `after` has not. Local.
std::vector<int> lost_ranks(const GroupPtr& before, const GroupPtr& after);

}  // namespace lockstep
