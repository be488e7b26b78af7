#include "lockstep/shm/lifeline.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>

#include "lockstep/base/str.h"
#include "lockstep/shm/descriptors.h"
#include "lockstep/shm/errors.h"

namespace lockstep::shm {
namespace {

// A plain table of atomics: the forked child may take no lock.
constexpr std::size_t kMostLifelines = 64;
std::array<std::atomic<int>, kMostLifelines>& kept_ends() {
  static auto& table = *[] {
    auto* made = new std::array<std::atomic<int>, kMostLifelines>;
    for (auto& entry : *made) entry.store(-1);
    return made;
  }();
  return table;
}

std::atomic<int> generation = 0;

void close_in_child() {
  generation.fetch_add(1, std::memory_order_relaxed);
  for (auto& entry : kept_ends()) {
    const int fd = entry.exchange(-1);
    if (fd >= 0) ::close(fd);
  }
}

}  // namespace

int fork_generation() {
  static const int registered = ::pthread_atfork(nullptr, nullptr, close_in_child);
  (void)registered;
  return generation.load(std::memory_order_relaxed);
}

std::pair<UniqueFd, UniqueFd> make_lifeline() {
  fork_generation();
  int ends[2] = {-1, -1};
  if (::pipe2(ends, O_CLOEXEC) != 0) {
    throw MemoryError(str("[lockstep/shm] a pipe could not be made: ", describe_error(errno)));
  }
  std::pair<UniqueFd, UniqueFd> made{ends[1], ends[0]};
  for (auto& entry : kept_ends()) {
    int none = -1;
    if (entry.compare_exchange_strong(none, ends[1])) return made;
  }
  throw MemoryError(str("[lockstep/shm] this process has ", kMostLifelines, " lifelines, and there are no more"));
}

void forget_lifeline(int fd) {
  for (auto& entry : kept_ends()) {
    int expected = fd;
    if (entry.compare_exchange_strong(expected, -1)) return;
  }
}

}  // namespace lockstep::shm
