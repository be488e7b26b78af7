// Which signals a process or thread blocks or handles, as /proc says.
#pragma once

#include <string>

namespace lockstep {

/// Whether `signal` is in the set `name` ("SigBlk", "SigCgt", …) of a status file such as /proc/1/status; false if that
/// cannot be read.
bool is_in_signal_set(const std::string& status_file, const std::string& name, int signal);

}  // namespace lockstep
