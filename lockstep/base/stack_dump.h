// Where threads are, for hang reports. A thread is asked by signal and writes its own stack to a descriptor; nothing is
// allocated in the handler, so a thread that hangs inside malloc still answers.
#pragma once

#include <pthread.h>

#include <chrono>
#include <string>

namespace lockstep {

/// Takes over SIGUSR2 for this process. Idempotent. Call before the threads in question may hang.
void enable_stack_dumps();

/// The stack of `thread`, innermost frame first, names demangled. Empty if it does not answer within `patience`.
/// REQUIRES: enable_stack_dumps() was called and `thread` has not been joined.
std::string stack_of(pthread_t thread, std::chrono::milliseconds patience = std::chrono::seconds(2));

/// From now on SIGUSR2 from another process makes this one write the stacks of its threads to stderr, and go on. Does
/// nothing if the program has taken the signal already. Starts a thread, which writes. Idempotent, thread-safe.
void dump_stacks_on_request();

/// From now on SIGTERM makes the calling thread write `write_more(fd)` and its stack (raw frames, see readable_frames)
/// to `fd`, and ends the process with 128 + SIGTERM. `write_more` runs in a signal handler.
void explain_termination(int fd, void (*write_more)(int fd));

/// Makes raw frames readable: demangles names, drops the frames of the handler itself.
std::string readable_frames(const std::string& raw);

}  // namespace lockstep
