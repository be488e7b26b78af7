// Several futures as one, for calls and hooks that launch more than one collective.
#pragma once

#include <ATen/core/ivalue.h>

#include <vector>

#include "lockstep/comm/group.h"

namespace lockstep {

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

namespace detail {

/// Completes when all have, with the value of the last; an error of any is its error. `futures` is not empty.
FuturePtr all_of(const std::vector<FuturePtr>& futures);

/// Waits for what somebody has launched over `group`, as Pending::wait() does for a call: where the backend names no
/// missing ranks, this gives up when others have, and finds out who is missing. `what` opens messages. The future's
/// own errors are left to whoever asks for its value, those of peers excepted.
void wait_for(c10::ivalue::Future& future, const GroupPtr& group, const char* what);

/// For callbacks of all_of(): lets the current stream wait for what the futures, which are complete, hold.
void wait_on_stream(const std::vector<FuturePtr>& futures);

}  // namespace detail
}  // namespace lockstep
