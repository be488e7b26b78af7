// Ranks as threads of this process: no sockets, no fork, milliseconds to start. See docs/testing.md for what differs
// from processes.
#pragma once

#include "lockstep/testing/run.h"

namespace lockstep::testing {

/// Runs `body` once per rank, each on a thread with its own world, default group, observers and generator. Blocking.
/// Autograd runs backward on the rank's own thread. A rank that throws wakes the others, and only its error is
/// reported. If the time is over, the report says for every rank what it did last and where it is; ranks that do not
/// end even then end the process.
RunReport run_threads(RunOptions options, const RankBody& body);

}  // namespace lockstep::testing
