// Several futures as one, for hooks that launch more than one collective. Internal to ddp.
#pragma once

#include <vector>

#include "lockstep/ddp/comm_hook.h"

namespace lockstep::detail {

/// Completes when all have, with the value of the last; an error of any is its error. `futures` is not empty.
FuturePtr all_of(const std::vector<FuturePtr>& futures);

/// For callbacks of all_of(): lets the current stream wait for what the futures, which are complete, hold.
void wait_on_stream(const std::vector<FuturePtr>& futures);

}  // namespace lockstep::detail
