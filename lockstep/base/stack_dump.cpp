#include "lockstep/base/stack_dump.h"

#include <cxxabi.h>
#include <dirent.h>
#include <execinfo.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <memory>
#include <mutex>
#include <sstream>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/base/signal_sets.h"
#include "lockstep/base/str.h"
#include "lockstep/base/unique_fd.h"

namespace lockstep {
namespace {

constexpr int kStackSignal = SIGUSR2;
constexpr int kMaxFrames = 64;
constexpr char kEnd[] = "--end of stack--\n";

// Read by signal handlers.
std::atomic<int> stack_fd = -1;
std::atomic<int> request_fd = -1;  // wakes the thread that writes all stacks

struct Termination {
  pthread_t thread;
  int fd;
  void (*write_more)(int fd);
};
std::atomic<const Termination*> termination = nullptr;

/// Without this function, the handler that calls it and the kernel's way into that.
[[gnu::noinline]] void write_own_stack(int fd) {
  constexpr int kOwnFrames = 3;
  void* frames[kMaxFrames];
  const int count = ::backtrace(frames, kMaxFrames);
  ::backtrace_symbols_fd(frames + kOwnFrames, std::max(0, count - kOwnFrames), fd);
  [[maybe_unused]] const auto written = ::write(fd, kEnd, sizeof(kEnd) - 1);
}

/// A signal to one thread asks for its stack; one to the process, from outside, for the stacks of all.
void on_stack_signal(int, siginfo_t* sender, void*) {
  const int saved_errno = errno;
  if (sender->si_code == SI_TKILL) {
    if (const int fd = stack_fd.load(); fd >= 0) write_own_stack(fd);
  } else if (const int fd = request_fd.load(); fd >= 0) {
    [[maybe_unused]] const auto written = ::write(fd, "", 1);
  }
  errno = saved_errno;
}

void on_termination(int signal, siginfo_t*, void*) {
  const Termination* explain = termination.load();
  if (!::pthread_equal(::pthread_self(), explain->thread)) {
    ::pthread_kill(explain->thread, signal);
    return;
  }
  explain->write_more(explain->fd);
  write_own_stack(explain->fd);
  ::_exit(128 + signal);
}

void handle(int signal, void (*handler)(int, siginfo_t*, void*)) {
  // The first backtrace() loads libgcc and allocates; do that here, not in the handler.
  void* frame = nullptr;
  ::backtrace(&frame, 1);
  struct sigaction action = {};
  action.sa_sigaction = handler;
  action.sa_flags = SA_RESTART | SA_SIGINFO;
  ::sigaction(signal, &action, nullptr);
}

std::string demangle(const std::string& name) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> text(abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status),
                                                         &std::free);
  return status == 0 ? text.get() : name;
}

/// What a thread answers to the signal that `send` sends it.
std::string ask(const std::function<long()>& send, std::chrono::milliseconds patience) {
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return "";
  UniqueFd reader(ends[0]);
  UniqueFd writer(ends[1]);
  stack_fd = writer.get();
  if (send() != 0) {
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

/// All but the calling one, and what to call them.
std::vector<std::pair<pid_t, std::string>> other_threads() {
  struct Close {
    void operator()(DIR* folder) const { ::closedir(folder); }
  };
  const std::unique_ptr<DIR, Close> tasks(::opendir("/proc/self/task"));
  std::vector<std::pair<pid_t, std::string>> threads;
  while (const dirent* entry = tasks ? ::readdir(tasks.get()) : nullptr) {
    const pid_t id = static_cast<pid_t>(std::strtol(entry->d_name, nullptr, 10));
    if (id <= 0 || id == ::gettid()) continue;
    std::string name;
    std::getline(std::ifstream(str("/proc/self/task/", id, "/comm")), name);
    threads.emplace_back(id, id == ::getpid() ? str("main thread (", id, ")") : str("thread ", id, " (", name, ")"));
  }
  return threads;
}

/// For longer than a handler that has just woken us needs to return: it blocks the signal until then.
bool blocks_stack_signal(pid_t thread) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(300);
  while (is_in_signal_set(str("/proc/self/task/", thread, "/status"), "SigBlk", kStackSignal)) {
    if (std::chrono::steady_clock::now() > deadline) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return false;
}

/// Threads that wait at the same place, as workers do, are named together.
std::string stacks_of_other_threads(std::chrono::milliseconds patience) {
  const auto deadline = std::chrono::steady_clock::now() + patience;
  std::vector<std::pair<std::string, std::vector<std::string>>> places;
  for (const auto& [id, name] : other_threads()) {
    std::string stack = "  blocks the signal that asks for its stack\n";
    if (!blocks_stack_signal(id)) {
      const auto left =
          std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
      stack = ask([id = id] { return ::syscall(SYS_tgkill, ::getpid(), id, kStackSignal); }, left);
      if (stack.empty()) stack = "  does not answer\n";
    }
    auto found = places.begin();
    while (found != places.end() && found->first != stack) ++found;
    if (found == places.end()) found = places.insert(found, {stack, {}});
    found->second.push_back(name);
  }
  std::string text;
  for (const auto& [stack, names] : places) text += join(names, ", ") + ":\n" + stack;
  return text;
}

void answer_requests(int reader) {
  for (char byte = 0; ::read(reader, &byte, 1) == 1;) {
    // Shorter than the launcher waits for it.
    const auto text = str("stacks of process ", ::getpid(), ", which was asked for them:\n",
                          stacks_of_other_threads(std::chrono::milliseconds(1500)));
    std::size_t done = 0;
    while (done < text.size()) {
      const auto written = ::write(STDERR_FILENO, text.data() + done, text.size() - done);
      if (written <= 0) break;
      done += static_cast<std::size_t>(written);
    }
  }
}

/// With all signals blocked: those of the process are for threads that know what to do with them.
void start_answering(int reader) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread(answer_requests, reader).detach();
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace

void enable_stack_dumps() {
  static std::once_flag once;
  std::call_once(once, [] { handle(kStackSignal, on_stack_signal); });
}

std::string stack_of(pthread_t thread, std::chrono::milliseconds patience) {
  return ask([thread] { return ::pthread_kill(thread, kStackSignal); }, patience);
}

void dump_stacks_on_request() {
  static std::once_flag once;
  std::call_once(once, [] {
    struct sigaction now = {};
    if (::sigaction(kStackSignal, nullptr, &now) != 0 || (now.sa_flags & SA_SIGINFO) != 0) return;
    if (now.sa_handler != SIG_DFL) return;
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) return;
    request_fd = ends[1];
    start_answering(ends[0]);
    enable_stack_dumps();
  });
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
