// Finding out who is missing. A transport that loses a peer says at best that a connection broke. When a collective
// fails, every survivor signs the group's failure page in the store, so that ranks still waiting stop too, and after a
// short grace all of them name the same ranks: those that did not sign. Internal to comm.
#pragma once

#include <ATen/core/ivalue.h>

#include <exception>
#include <functional>
#include <optional>
#include <string>

#include "lockstep/comm/group_state.h"

namespace lockstep::detail {

/// True if some rank of the group has given up. Costs one round trip to the store; asked only by ranks that wait for
/// long.
bool has_failure(GroupState& state);

/// Signs the failure page and throws c10::DistBackendError that names `operation`, the ranks that did not sign, and the
/// cause: what this rank saw or, if that is nothing (empty), what others say they saw. The group refuses further calls.
/// Blocks up to the grace period.
[[noreturn]] void report_failure(GroupState& state, const std::string& operation, const std::string& cause);

/// Signs the failure page for a rank that leaves by itself: the others' errors say `reason`, the first one given in the
/// group. Throws if the store cannot be reached.
void sign_out(GroupState& state, const std::string& reason);

/// Waits for `future`. Every 100 ms it looks whether another rank has given up, and then does so too. Who waits that
/// long shows in the store what for. `operation` is asked for messages only.
void wait_unless_others_give_up(c10::ivalue::Future& future, GroupState& state,
                                const std::function<std::string()>& operation);

/// What a rank of the group is waiting for, or was when it last waited long; none if it never did.
struct ShownWait {
  uint64_t launched = 0;  // collectives, up to then
  std::string operation = "";
};
std::optional<ShownWait> shown_wait_of(GroupState& state, int rank);

/// Throws if the group failed earlier.
void check_usable(GroupState& state);

/// An exception's message without the backtrace libtorch adds.
std::string message_of(const std::exception& error);

/// The first line of that.
std::string first_line(const std::exception& error);

}  // namespace lockstep::detail
