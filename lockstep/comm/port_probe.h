// Does anybody listen there? Internal to comm.
#pragma once

#include <chrono>
#include <string>

namespace lockstep::detail {

/// Connects to host:port once, by each address of the host, and hangs up. Empty if somebody accepted, else why not.
/// Takes no longer than `patience`, but for looking the name up.
std::string probe_port(const std::string& host, int port, std::chrono::milliseconds patience);

}  // namespace lockstep::detail
