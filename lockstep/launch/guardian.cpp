#include "lockstep/launch/guardian.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <ctime>
#include <iterator>

#include "lockstep/launch/process_tree.h"

namespace lockstep::detail {
namespace {

// Helpers of the program that clean up after it (Python's resource tracker, torch_shm_manager) get this long to finish.
constexpr std::int64_t kOrphansLingerNs = 1'000'000'000;
constexpr int kKillLimitMs = 10'000;

std::int64_t steady_nanoseconds() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * std::int64_t{1'000'000'000} + now.tv_nsec;
}

void close_range_of_fds(unsigned first, unsigned last) {
  if (first > last || ::syscall(SYS_close_range, first, last, 0) == 0) return;
  // Before Linux 5.9.
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  const unsigned end = static_cast<unsigned>(std::min<rlim_t>(limit.rlim_cur, 1 << 16));
  for (unsigned fd = first; fd <= last && fd < end; ++fd) ::close(static_cast<int>(fd));
}

// Closes all but 0, 1, 2 and the ascending list. What we inherited would otherwise keep pipes and ports open.
void close_all_but(const int* kept, std::size_t count) {
  unsigned next = 3;
  for (std::size_t i = 0; i < count; ++i) {
    if (kept[i] < 3) continue;
    const auto fd = static_cast<unsigned>(kept[i]);
    if (fd > next) close_range_of_fds(next, fd - 1);
    next = fd + 1;
  }
  close_range_of_fds(next, ~0U);
}

void reset_signals() {
  struct sigaction defaults {};
  defaults.sa_handler = SIG_DFL;
  for (int signal = 1; signal < NSIG; ++signal) ::sigaction(signal, &defaults, nullptr);
}

void report(int control, GuardianReport::Kind kind, int value) {
  const GuardianReport message{kind, value, steady_nanoseconds()};
  (void)!::send(control, &message, sizeof(message), MSG_NOSIGNAL);
}

[[noreturn]] void exec_program(const GuardianPlan& plan, pid_t guardian) {
  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != guardian) ::_exit(127);
  bool placed = ::dup2(plan.null_fd, 0) == 0 && ::dup2(plan.stdout_fd, 1) == 1 && ::dup2(plan.stderr_fd, 2) == 2;
  for (std::size_t i = 0; placed && i < plan.move_count; ++i) {
    placed = ::dup2(plan.moves[i].from, plan.moves[i].to) == plan.moves[i].to;
  }
  if (placed) {
    sigset_t none;
    sigemptyset(&none);
    ::sigprocmask(SIG_SETMASK, &none, nullptr);
    ::execve(plan.program, plan.argv, plan.environment);
    if (errno == ENOEXEC) ::execve("/bin/sh", plan.argv_for_shell, plan.environment);
  }
  const int error = errno;
  (void)!::write(plan.exec_error_writer, &error, sizeof(error));
  ::_exit(127);
}

// Returns the program's pid, or reports the failure and ends.
pid_t start_program(const GuardianPlan& plan) {
  const pid_t guardian = ::getpid();
  const pid_t program = fork_quietly();
  if (program == 0) exec_program(plan, guardian);
  int error = errno;
  if (program > 0) {
    ::setpgid(program, program);
    ::close(plan.exec_error_writer);
    // End of file: the program's copy was closed by a successful exec.
    if (::read(plan.exec_error_reader, &error, sizeof(error)) == 0) return program;
    ::waitpid(program, nullptr, 0);
  }
  report(plan.control_fd, GuardianReport::Kind::kNotStarted, error);
  ::_exit(1);
}

// So that killing "everything called lockstep-run" spares the one process that can clean up.
void rename_process(const GuardianPlan& plan) {
  constexpr char kTitle[] = "lockstep-guard";
  ::prctl(PR_SET_NAME, kTitle);
  if (plan.title == nullptr) return;
  std::memset(plan.title, 0, plan.title_bytes);
  if (plan.title_bytes > 0) std::memcpy(plan.title, kTitle, std::min(plan.title_bytes - 1, sizeof(kTitle) - 1));
}

class Guardian {
 public:
  Guardian(const GuardianPlan& plan, pid_t program, int child_events)
      : control_(plan.control_fd), parent_(plan.parent_pidfd), child_events_(child_events), program_(program) {}

  [[noreturn]] void watch() {
    for (;;) {
      pollfd fds[] = {{control_, POLLIN, 0}, {child_events_, POLLIN, 0}, {parent_, POLLIN, 0}};
      ::poll(fds, 3, poll_timeout_ms());
      // Children first: a death that came before the hang-up is still reported.
      signalfd_siginfo ignored;
      while (::read(child_events_, &ignored, sizeof(ignored)) > 0) {
      }
      if (!reap()) ::_exit(0);
      if (fds[2].revents != 0) end_tree();
      if (fds[0].revents != 0) obey();
      if (!program_runs_ && steady_nanoseconds() >= orphans_end_at_) end_tree();
    }
  }

 private:
  int poll_timeout_ms() const {
    if (program_runs_) return -1;
    return static_cast<int>(std::max<std::int64_t>(0, (orphans_end_at_ - steady_nanoseconds()) / 1'000'000)) + 1;
  }

  // False once program and orphans are all gone.
  bool reap() {
    for (;;) {
      int status = 0;
      const pid_t pid = ::waitpid(-1, &status, WNOHANG);
      if (pid == 0) return true;
      if (pid < 0) return false;
      if (pid != program_) continue;
      program_runs_ = false;
      orphans_end_at_ = steady_nanoseconds() + kOrphansLingerNs;
      if (WIFSIGNALED(status)) {
        report(control_, GuardianReport::Kind::kSignaled, WTERMSIG(status));
      } else {
        report(control_, GuardianReport::Kind::kExited, WEXITSTATUS(status));
      }
    }
  }

  void obey() {
    unsigned char order = 0;
    const ssize_t bytes = ::recv(control_, &order, 1, MSG_DONTWAIT);
    if (bytes < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (bytes <= 0) end_tree();
    const int signal = order & ~kProgramOnly;
    // Unreaped, the program keeps its pid, so process and group are surely its own.
    if (program_runs_) ::kill((order & kProgramOnly) != 0 ? program_ : -program_, signal);
    if (signal == SIGKILL) end_tree();
  }

  [[noreturn]] void end_tree() {
    if (program_runs_) {
      ::kill(-program_, SIGKILL);
      ::kill(program_, SIGKILL);
      // Its status is still to be reported, so reap it here and nothing else first.
      for (int waited = 0; reap() && program_runs_ && waited < kKillLimitMs; ++waited) ::poll(nullptr, 0, 1);
    }
    kill_children(kKillLimitMs);
    ::_exit(0);
  }

  const int control_;
  const int parent_;
  const int child_events_;
  const pid_t program_;
  bool program_runs_ = true;
  std::int64_t orphans_end_at_ = 0;
};

}  // namespace

pid_t fork_quietly() noexcept {
#if defined(__SANITIZE_THREAD__)
  // The sanitizer's runtime has locks of its own, and only knows fork.
  return ::fork();
#else
  return ::_Fork();
#endif
}

void run_guardian(const GuardianPlan& plan) noexcept {
  // A session of its own: neither Ctrl-C nor a kill of the launcher's process group reaches guardian or program.
  ::setsid();
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  ::prctl(PR_SET_PDEATHSIG, 0);
  reset_signals();
  close_all_but(plan.kept_fds, plan.kept_count);

  sigset_t child_signal;
  sigemptyset(&child_signal);
  sigaddset(&child_signal, SIGCHLD);
  const int child_events = ::signalfd(-1, &child_signal, SFD_CLOEXEC | SFD_NONBLOCK);
  if (child_events < 0) {
    report(plan.control_fd, GuardianReport::Kind::kNotStarted, errno);
    ::_exit(1);
  }
  const pid_t program = start_program(plan);

  rename_process(plan);
  for (int fd = 0; fd < 3; ++fd) ::dup2(plan.null_fd, fd);
  int kept[] = {plan.control_fd, plan.parent_pidfd, child_events};
  std::sort(std::begin(kept), std::end(kept));
  close_all_but(kept, std::size(kept));
  (void)!::chdir("/");
  report(plan.control_fd, GuardianReport::Kind::kStarted, program);
  Guardian(plan, program, child_events).watch();
}

}  // namespace lockstep::detail
