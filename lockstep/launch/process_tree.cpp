#include "lockstep/launch/process_tree.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace lockstep::detail {
namespace {

// What getdents64 writes; glibc's readdir allocates and locks.
struct DirectoryEntry {
  std::uint64_t inode;
  std::int64_t offset;
  unsigned short bytes;
  unsigned char type;
  char name[1];
};

pid_t parse_pid(const char* text) {
  pid_t pid = 0;
  for (; *text >= '0' && *text <= '9'; ++text) pid = pid * 10 + (*text - '0');
  return *text == '\0' || *text == ' ' ? pid : 0;
}

// The fourth field of "pid (name) state parent ...". The name may hold spaces and parentheses.
pid_t parent_of(int proc, const char* pid_text) {
  char path[32];
  const std::size_t length = std::strlen(pid_text);
  if (length > 16) return 0;
  // NOLINTNEXTLINE(bugprone-not-null-terminated-result): the next line ends the string
  std::memcpy(path, pid_text, length);
  std::memcpy(path + length, "/stat", 6);
  const int fd = ::openat(proc, path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 0;
  char text[256];
  const ssize_t bytes = ::read(fd, text, sizeof(text) - 1);
  ::close(fd);
  if (bytes <= 0) return 0;
  text[bytes] = '\0';
  const char* after_name = std::strrchr(text, ')');
  if (after_name == nullptr || std::strlen(after_name) < 5) return 0;
  return parse_pid(after_name + 4);
}

}  // namespace

int signal_children(int signal) noexcept {
  const int proc = ::open("/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (proc < 0) return 0;
  const pid_t self = ::getpid();
  int found = 0;
  alignas(DirectoryEntry) char buffer[8192];
  for (;;) {
    const long bytes = ::syscall(SYS_getdents64, proc, buffer, sizeof(buffer));
    if (bytes <= 0) break;
    for (long at = 0; at < bytes;) {
      const auto* entry = reinterpret_cast<const DirectoryEntry*>(buffer + at);
      at += entry->bytes;
      const char* name = buffer + (at - entry->bytes) + offsetof(DirectoryEntry, name);
      const pid_t pid = parse_pid(name);
      // A child of ours keeps its pid until we reap it, so this cannot hit a stranger.
      if (pid > 0 && parent_of(proc, name) == self && ::kill(pid, signal) == 0) ++found;
    }
  }
  ::close(proc);
  return found;
}

bool reap_children() noexcept {
  for (;;) {
    const pid_t pid = ::waitpid(-1, nullptr, WNOHANG);
    if (pid == 0) return true;
    if (pid < 0 && errno != EINTR) return false;
  }
}

void kill_children(int limit_ms) noexcept {
  constexpr int kPauseMs = 2;
  for (int waited = 0; reap_children() && waited < limit_ms; waited += kPauseMs) {
    signal_children(SIGKILL);
    ::poll(nullptr, 0, kPauseMs);
  }
}

}  // namespace lockstep::detail
