// The guardian: a process forked per child that starts the program, adopts orphans of its tree and outlives nobody.
// It is forked without exec from a process that may have many threads, so it runs only async-signal-safe code on memory
// prepared before the fork. Internal to launch: private to Child.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

namespace lockstep::detail {

struct FdMove {
  int from;
  int to;
};

/// Everything the guardian needs, borrowed from the stack of the thread that forks it. Every descriptor except
/// `stdout_fd` and `stderr_fd` has a number above all targets of `moves`.
struct GuardianPlan {
  const char* program;
  char* const* argv;
  char* const* argv_for_shell;  // for a script without "#!", which a shell would run too
  char* const* environment;
  int control_fd;    // socket: orders come in, GuardianReports go out
  int parent_pidfd;  // readable when the parent process is dead; -1 where the kernel has no pidfd
  int null_fd;
  int stdout_fd;
  int stderr_fd;
  int exec_error_reader;
  int exec_error_writer;
  const FdMove* moves;
  std::size_t move_count;
  const int* kept_fds;  // ascending: what must survive until the program is started
  std::size_t kept_count;
  char* title;  // memory that /proc/*/cmdline shows, to be overwritten; nullptr if unknown
  std::size_t title_bytes;
};

/// An order to the guardian is one byte: a signal for the group or, with this bit, for the program alone.
inline constexpr int kProgramOnly = 0x80;

/// One message from guardian to parent. The socket's end of file says that the whole tree is gone.
struct GuardianReport {
  enum class Kind : std::int32_t { kStarted, kNotStarted, kExited, kSignaled };
  Kind kind;
  std::int32_t value;  // pid, errno, exit code or signal
  std::int64_t steady_nanoseconds;
};

/// fork without pthread_atfork handlers: those of OpenMP or of an allocator may take locks that another thread holds,
/// and the guardian needs none of them.
pid_t fork_quietly() noexcept;

/// The body of the guardian. REQUIRES: all signals blocked.
[[noreturn]] void run_guardian(const GuardianPlan& plan) noexcept;

}  // namespace lockstep::detail
