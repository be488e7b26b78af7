#include "lockstep/launch/child.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <fstream>
#include <limits>
#include <stdexcept>
#include <system_error>
#include <tuple>
#include <utility>

#include "lockstep/base/str.h"
#include "lockstep/launch/command.h"
#include "lockstep/launch/guardian.h"

namespace lockstep {
namespace {

using detail::GuardianReport;

[[noreturn]] void throw_errno(int error, const std::string& what) {
  throw std::system_error(error, std::generic_category(), what);
}

struct Pipe {
  UniqueFd reader;
  UniqueFd writer;
};

Pipe make_pipe() {
  int fds[2];
  if (::pipe2(fds, O_CLOEXEC) != 0) throw_errno(errno, "cannot create a pipe");
  return {UniqueFd(fds[0]), UniqueFd(fds[1])};
}

Pipe make_control() {
  int fds[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds) != 0) throw_errno(errno, "cannot create a socket");
  return {UniqueFd(fds[0]), UniqueFd(fds[1])};
}

// A copy numbered `lowest` or above, so that placing one descriptor for the program never overwrites another.
UniqueFd lift(int fd, int lowest) {
  const int copy = ::fcntl(fd, F_DUPFD_CLOEXEC, lowest);
  if (copy < 0) throw_errno(errno, str("cannot copy file descriptor ", fd));
  return UniqueFd(copy);
}

// Where this process's arguments lie, for the guardian's name; fields 48 and 49 of /proc/self/stat.
std::pair<char*, std::size_t> argument_memory() {
  std::ifstream stat("/proc/self/stat");
  stat.ignore(std::numeric_limits<std::streamsize>::max(), ')');
  std::string skipped;
  for (int field = 3; field < 48; ++field) stat >> skipped;
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;
  stat >> begin >> end;
  if (!stat || begin == 0 || end <= begin) return {nullptr, 0};
  // NOLINTNEXTLINE(performance-no-int-to-ptr): the kernel gives the address as a number
  return {reinterpret_cast<char*>(begin), end - begin};
}

// The descriptors of both sides while a child is being started; all closed when start is over, except what Child takes.
struct Wiring {
  explicit Wiring(const ChildOptions& options) : control(make_control()), exec_error(make_pipe()) {
    int lowest = 10;
    for (const auto& inherited : options.inherited_fds) {
      if (inherited.as < 3) throw std::invalid_argument("a child's file descriptors 0, 1 and 2 are not for inheriting");
      lowest = std::max(lowest, inherited.as + 1);
    }
    if (options.output == ChildOutput::kPipe) {
      output = make_pipe();
      errors = make_pipe();
      for (const int fd : {output.reader.get(), errors.reader.get()}) ::fcntl(fd, F_SETFL, O_NONBLOCK);
    }
    const UniqueFd null(::open("/dev/null", O_RDWR | O_CLOEXEC));
    if (!null) throw_errno(errno, "cannot open /dev/null");
    const UniqueFd pidfd(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0)));

    plan.control_fd = keep(control.writer.get(), lowest);
    plan.parent_pidfd = pidfd ? keep(pidfd.get(), lowest) : -1;
    plan.null_fd = keep(null.get(), lowest);
    // An inherited stream that is closed here becomes /dev/null.
    const auto or_null = [&](int fd) { return ::fcntl(fd, F_GETFD) < 0 ? null.get() : fd; };
    plan.stdout_fd = keep(output.writer ? output.writer.get() : or_null(1), lowest);
    plan.stderr_fd = keep(errors.writer ? errors.writer.get() : or_null(2), lowest);
    plan.exec_error_reader = keep(exec_error.reader.get(), lowest);
    plan.exec_error_writer = keep(exec_error.writer.get(), lowest);
    for (const auto& inherited : options.inherited_fds) {
      moves.push_back({keep(inherited.fd, lowest), inherited.as});
    }
    plan.moves = moves.data();
    plan.move_count = moves.size();
    for (const auto& fd : lifted) kept.push_back(fd.get());
    std::sort(kept.begin(), kept.end());
    plan.kept_fds = kept.data();
    plan.kept_count = kept.size();
  }

  int keep(int fd, int lowest) { return lifted.emplace_back(lift(fd, lowest)).get(); }

  /// After the fork: whatever is the guardian's.
  void close_guardian_side() {
    lifted.clear();
    control.writer.reset();
    output.writer.reset();
    errors.writer.reset();
    exec_error = {};
  }

  detail::GuardianPlan plan{};
  Pipe control;  // a socket pair: `reader` stays here, `writer` goes to the guardian
  Pipe exec_error;
  Pipe output;
  Pipe errors;
  std::vector<UniqueFd> lifted;
  std::vector<detail::FdMove> moves;
  std::vector<int> kept;
};

// No signal handler of this process may run in the guardian.
pid_t fork_guardian(const detail::GuardianPlan& plan) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  const pid_t pid = detail::fork_quietly();
  if (pid == 0) detail::run_guardian(plan);
  const int error = errno;
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (pid < 0) throw_errno(error, "cannot fork");
  return pid;
}

void reap(pid_t pid) {
  while (::waitpid(pid, nullptr, 0) < 0 && errno == EINTR) {
  }
}

// Returns the bytes received: 0 at the end of file, -1 if there is nothing yet.
ssize_t receive(int fd, GuardianReport& report, int flags) {
  for (;;) {
    const ssize_t bytes = ::recv(fd, &report, sizeof(report), flags);
    if (bytes >= 0) return bytes;
    if (errno == EAGAIN) return -1;
    // Reset: it ended before it had read an order. What it reported comes behind the error.
    if (errno != EINTR && errno != ECONNRESET) return 0;
  }
}

}  // namespace

Child::Child(const ChildOptions& options) {
  if (options.argv.empty()) throw std::invalid_argument("a child needs a program");
  std::string program = detail::find_program(options.argv[0], detail::search_path(options.environment));
  std::vector<std::string> arguments = options.argv;
  std::vector<std::string> shell_arguments = {"/bin/sh", program};
  shell_arguments.insert(shell_arguments.end(), options.argv.begin() + 1, options.argv.end());
  std::vector<std::string> environment = detail::changed_environment(options.environment);
  const auto argv = detail::null_terminated(arguments);
  const auto argv_for_shell = detail::null_terminated(shell_arguments);
  const auto envp = detail::null_terminated(environment);

  Wiring wiring(options);
  wiring.plan.program = program.c_str();
  wiring.plan.argv = argv.data();
  wiring.plan.argv_for_shell = argv_for_shell.data();
  wiring.plan.environment = envp.data();
  std::tie(wiring.plan.title, wiring.plan.title_bytes) = argument_memory();

  guardian_ = fork_guardian(wiring.plan);
  wiring.close_guardian_side();
  GuardianReport report{};
  const ssize_t bytes = receive(wiring.control.reader.get(), report, 0);
  if (bytes <= 0 || report.kind != GuardianReport::Kind::kStarted) {
    wiring.control.reader.reset();
    reap(guardian_);
    throw_errno(bytes <= 0 ? ECHILD : report.value, str("cannot start '", options.argv[0], "'"));
  }
  pid_ = report.value;
  control_ = std::move(wiring.control.reader);
  stdout_ = std::move(wiring.output.reader);
  stderr_ = std::move(wiring.errors.reader);
}

Child::~Child() {
  if (!control_) return;
  // Hanging up is the order to kill the tree; a guardian whose parent handles SIGCHLD itself is reaped elsewhere.
  control_.reset();
  reap(guardian_);
}

void Child::update() {
  while (control_) {
    GuardianReport report{};
    const ssize_t bytes = receive(control_.get(), report, MSG_DONTWAIT);
    if (bytes < 0) return;
    if (bytes == 0) return lose_guardian();
    const bool exited = report.kind == GuardianReport::Kind::kExited;
    status_ = exited ? ExitStatus{.code = report.value, .signal = {}} : ExitStatus{.code = {}, .signal = report.value};
    exit_time_ = Clock::time_point(std::chrono::nanoseconds(report.steady_nanoseconds));
  }
}

void Child::lose_guardian() noexcept {
  control_.reset();
  reap(guardian_);
  if (status_) return;
  // The guardian itself was killed. The program got SIGKILL by that; its group has not.
  ::kill(-pid_, SIGKILL);
  status_ = ExitStatus{.code = {}, .signal = SIGKILL};
  exit_time_ = Clock::now();
}

void Child::kill(int signal) noexcept {
  order(static_cast<unsigned char>(signal));
}

void Child::signal_program(int signal) noexcept {
  order(static_cast<unsigned char>(signal | detail::kProgramOnly));
}

void Child::order(unsigned char byte) noexcept {
  if (!control_) return;
  (void)!::send(control_.get(), &byte, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
}

bool Child::wait_until_gone(std::chrono::milliseconds limit) {
  const auto end = Clock::now() + limit;
  for (;;) {
    update();
    if (is_gone()) return true;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(end - Clock::now()).count();
    if (left <= 0) return false;
    pollfd event{event_fd(), POLLIN, 0};
    ::poll(&event, 1, static_cast<int>(std::min<long long>(left, 60'000)));
  }
}

}  // namespace lockstep
