// One child process and everything it starts. The program runs in its own process group under a guardian, a process of
// ours that adopts orphans of the tree (see docs/launch.md). Whatever ends first (the program, the Child object or this
// whole process, even by SIGKILL), no process of the tree is left. A Child is used by one thread at a time.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/unique_fd.h"
#include "lockstep/launch/exit_status.h"

namespace lockstep {

/// Changes to an environment: a value sets the variable, nullopt removes it.
using EnvironmentChanges = std::map<std::string, std::optional<std::string>>;

/// `fd` of this process, which the child shall see as number `as` (not 0, 1 or 2).
struct InheritedFd {
  int fd = -1;
  int as = -1;
};

enum class ChildOutput {
  kPipe,     // stdout and stderr are pipes, read through Child::stdout_fd() and stderr_fd()
  kInherit,  // stdout and stderr are those of this process
};

struct ChildOptions {
  std::vector<std::string> argv;  // argv[0] is looked up in PATH unless it has a slash
  EnvironmentChanges environment;
  std::vector<InheritedFd> inherited_fds;
  ChildOutput output = ChildOutput::kPipe;
};

class Child {
 public:
  using Clock = std::chrono::steady_clock;

  /// Starts the program and returns once it has been exec'ed. Safe in a process with many threads: everything is
  /// prepared before, and only async-signal-safe calls run between fork and exec. The program starts with stdin
  /// /dev/null, default signal handlers, nothing blocked, and no other file descriptors. It gets SIGKILL when its
  /// guardian dies; since the guardian has one thread, it does not matter which thread of ours creates the Child, nor
  /// whether that thread lives on. Throws std::system_error naming the program (ENOENT, EACCES, ...) and leaves nothing
  /// behind.
  explicit Child(const ChildOptions& options);

  Child(Child&&) noexcept = default;
  Child& operator=(Child&&) = delete;

  /// Kills the whole tree if it is still there, and waits until it is gone.
  ~Child();

  /// The program's process id, also the id of its process group.
  pid_t pid() const { return pid_; }

  /// Non-blocking read ends, owned by the Child; -1 if the output is inherited.
  int stdout_fd() const { return stdout_.get(); }
  int stderr_fd() const { return stderr_.get(); }

  /// Readable when update() has news; -1 once is_gone().
  int event_fd() const { return control_.get(); }

  /// Takes in what the guardian reported. Does not block, except for reaping a guardian that is exiting.
  void update();

  /// How the program ended; nullopt while it runs, as of the last update().
  const std::optional<ExitStatus>& exit_status() const { return status_; }

  /// When the program ended, as its guardian saw it. REQUIRES: exit_status().
  Clock::time_point exit_time() const { return exit_time_; }

  /// Whether program and descendants are all gone, as of the last update().
  bool is_gone() const { return !control_; }

  /// Sends a signal to the program's process group; SIGKILL goes to the whole tree, other groups and sessions included.
  /// Does nothing once the program has ended, except for SIGKILL.
  void kill(int signal) noexcept;

  /// Sends a signal to the program alone, for requests its helpers would die of: "dump your stacks", say.
  void signal_program(int signal) noexcept;

  /// update() whenever there is news, until is_gone() or the time is over; returns is_gone().
  bool wait_until_gone(std::chrono::milliseconds limit);

 private:
  void order(unsigned char byte) noexcept;
  void lose_guardian() noexcept;

  pid_t pid_ = -1;
  pid_t guardian_ = -1;
  UniqueFd control_;  // to the guardian: its end hangs up when the tree is gone, ours when this process is
  UniqueFd stdout_;
  UniqueFd stderr_;
  std::optional<ExitStatus> status_;
  Clock::time_point exit_time_{};
};

}  // namespace lockstep
