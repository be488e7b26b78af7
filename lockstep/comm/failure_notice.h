// Leaving a group by an exception, and saying so. A rank that will take part in nothing more tells the others, who then
// throw naming it at once instead of waiting for their timeout. See docs/comm.md, "Who is missing".
#pragma once

#include <exception>

#include "lockstep/comm/group.h"

namespace lockstep {

/// Tells the other ranks of `group` that this one leaves by the exception `cause`, null if it is not known: they show
/// its first line. Collectives of the group throw c10::DistBackendError from then on, those under way included. Local;
/// blocks for a few messages to the store, and 0.2 s on the rank that serves it. Does nothing if the group has failed
/// already or has one rank.
///
/// Not told: ranks in gloo's reduce-scatter, which cannot be interrupted, and on NCCL those whose device waits.
void announce_failure(const GroupPtr& group, const std::exception_ptr& cause) noexcept;

/// For misuse that a rank notices by itself before anything was communicated, where the others may go on. If they
/// notice it too, which takes them no longer than 0.8 s, nothing happens and the group stays usable; else as
/// announce_failure(). Local; blocks until one of the two is known.
void announce_refusal(const GroupPtr& group, const std::exception_ptr& cause) noexcept;

}  // namespace lockstep
