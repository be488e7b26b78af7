// A pipe that hangs up when this process is gone, however it ends. Internal to shm.
#pragma once

#include <utility>

#include "lockstep/base/unique_fd.h"

namespace lockstep::shm {

/// First the end to keep, then the one the others watch. A process forked off this one does not inherit the first:
/// Python's data loaders fork, and would keep a dead rank looking alive.
std::pair<UniqueFd, UniqueFd> make_lifeline();

/// How many forks lie between this process and the first of its line that made a lifeline.
int fork_generation();

/// The kept end is about to be closed.
void forget_lifeline(int fd);

}  // namespace lockstep::shm
