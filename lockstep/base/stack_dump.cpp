#include "lockstep/base/stack_dump.h"

#include <cxxabi.h>
#include <execinfo.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <sstream>

#include "lockstep/base/unique_fd.h"

namespace lockstep {
namespace {

constexpr int kStackSignal = SIGUSR2;
constexpr int kMaxFrames = 64;
constexpr char kEnd[] = "--end of stack--\n";

// Read by signal handlers.
std::atomic<int> stack_fd = -1;

struct Termination {
  pthread_t thread;
  int fd;
  void (*write_more)(int fd);
};
std::atomic<const Termination*> termination = nullptr;

void write_own_stack(int fd) {
  void* frames[kMaxFrames];
  const int count = ::backtrace(frames, kMaxFrames);
  ::backtrace_symbols_fd(frames, count, fd);
  [[maybe_unused]] const auto written = ::write(fd, kEnd, sizeof(kEnd) - 1);
}

void on_stack_signal(int) {
  const int saved_errno = errno;
  if (const int fd = stack_fd.load(); fd >= 0) write_own_stack(fd);
  errno = saved_errno;
}

void on_termination(int signal) {
  const Termination* explain = termination.load();
  if (!::pthread_equal(::pthread_self(), explain->thread)) {
    ::pthread_kill(explain->thread, signal);
    return;
  }
  explain->write_more(explain->fd);
  write_own_stack(explain->fd);
  ::_exit(128 + signal);
}

void handle(int signal, void (*handler)(int)) {
  // The first backtrace() loads libgcc and allocates; do that here, not in the handler.
  void* frame = nullptr;
  ::backtrace(&frame, 1);
  struct sigaction action = {};
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART;
  ::sigaction(signal, &action, nullptr);
}

std::string demangle(const std::string& name) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> text(abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status),
                                                         &std::free);
  return status == 0 ? text.get() : name;
}

}  // namespace

void enable_stack_dumps() {
  static std::once_flag once;
  std::call_once(once, [] { handle(kStackSignal, on_stack_signal); });
}

std::string stack_of(pthread_t thread, std::chrono::milliseconds patience) {
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return "";
  UniqueFd reader(ends[0]);
  UniqueFd writer(ends[1]);
  stack_fd = writer.get();
  if (::pthread_kill(thread, kStackSignal) != 0) {
    stack_fd = -1;
    return "";
  }
  std::string raw;
  const auto deadline = std::chrono::steady_clock::now() + patience;
  while (raw.find(kEnd) == std::string::npos) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    pollfd request = {.fd = reader.get(), .events = POLLIN, .revents = 0};
    if (left.count() <= 0 || ::poll(&request, 1, static_cast<int>(left.count())) <= 0) {
      // It may be about to answer: both ends must stay what they are, or the write would hit a stranger or SIGPIPE.
      stack_fd = -1;
      reader.release();
      writer.release();
      return "";
    }
    char buffer[4096];
    const auto count = ::read(reader.get(), buffer, sizeof(buffer));
    if (count <= 0) break;
    raw.append(buffer, static_cast<std::size_t>(count));
  }
  stack_fd = -1;
  return readable_frames(raw);
}

void explain_termination(int fd, void (*write_more)(int fd)) {
  // Leaked: a signal may come at any time until the process ends.
  termination = new Termination{::pthread_self(), fd, write_more};
  handle(SIGTERM, on_termination);
}

std::string readable_frames(const std::string& raw) {
  // backtrace_symbols_fd writes "binary(mangled+0x12) [0xaddress]".
  std::istringstream lines(raw);
  std::ostringstream out;
  int number = 0;
  for (std::string line; std::getline(lines, line);) {
    if (line + "\n" == kEnd) continue;
    const auto open = line.find('(');
    const auto plus = line.find('+', open == std::string::npos ? 0 : open);
    std::string name = line;
    if (open != std::string::npos && plus != std::string::npos && plus > open + 1) {
      name = demangle(line.substr(open + 1, plus - open - 1));
    }
    if (name.find("write_own_stack") != std::string::npos || name.find("on_stack_signal") != std::string::npos ||
        name.find("on_termination") != std::string::npos) {
      continue;
    }
    out << "  #" << number++ << " " << name << "\n";
  }
  return out.str();
}

}  // namespace lockstep
