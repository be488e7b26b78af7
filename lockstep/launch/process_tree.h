// Finds and kills what a process has started. Async-signal-safe: no allocation, no stdio, no locks. Internal to launch.
#pragma once

#include <sys/types.h>

namespace lockstep::detail {

/// Sends `signal` to every direct child of the calling process, as /proc lists them. Returns how many were found.
int signal_children(int signal) noexcept;

/// Reaps every child that has ended, calling nobody; false once there are no children left.
bool reap_children() noexcept;

/// Kills and reaps children until none is left; as a subreaper that is the whole tree, for orphans become children.
/// Gives up after `limit_ms`: a process in an uninterruptible system call or of another user cannot be killed.
void kill_children(int limit_ms) noexcept;

}  // namespace lockstep::detail
