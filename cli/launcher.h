// Runs a job by its options: reserves the port, starts the ranks, restarts them after a failure, prints the summary.
// For main(): it takes over the process's signal handlers.
#pragma once

#include "cli/options.h"

namespace lockstep::cli {

/// Blocks until the job is over, and returns the code to exit with.
int launch(const RunOptions& options);

}  // namespace lockstep::cli
