// Sockets to peers that may die.
#pragma once

namespace lockstep {

/// From now on writing to a connection whose other end is gone is an error, not SIGPIPE that kills the process, unless
/// the program handles the signal itself. For transports that do not ask for that themselves. Thread-safe.
void keep_broken_pipes_from_killing();

}  // namespace lockstep
