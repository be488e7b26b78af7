#include "lockstep/shm/signal.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <ctime>
#include <thread>

namespace lockstep::shm {
namespace {

// Not the private kind: the sleeper may be in another process.
void futex_wait(const std::atomic<std::uint32_t>& word, std::uint32_t seen, std::chrono::milliseconds nap) {
  const timespec time = {.tv_sec = nap.count() / 1000, .tv_nsec = (nap.count() % 1000) * 1'000'000};
  ::syscall(SYS_futex, &word, FUTEX_WAIT, seen, &time, nullptr, 0);
}

void futex_wake(const std::atomic<std::uint32_t>& word, int most) {
  ::syscall(SYS_futex, &word, FUTEX_WAKE, most, nullptr, nullptr, 0);
}

void futex_wake_all(const std::atomic<std::uint32_t>& word) {
  futex_wake(word, INT_MAX);
}

using Clock = std::chrono::steady_clock;

// Giving the core away is the quickest way to a peer that waits for it. If it goes to a stranger instead, it comes back
// milliseconds later, while a sleeper is woken within microseconds: after a few of those nobody yields for a while. One
// alone may have gone to a peer that was busy.
constexpr auto kQuickYield = std::chrono::microseconds(200);
constexpr int kMostSlowYields = 3;
constexpr auto kTimeWithoutYields = std::chrono::milliseconds(100);
std::atomic<Clock::rep> yields_again_at = 0;
std::atomic<int> slow_yields = 0;  // in a row

bool may_yield() {
  const auto again_at = yields_again_at.load(std::memory_order_relaxed);
  return again_at == 0 || Clock::now().time_since_epoch().count() >= again_at;
}

bool yield_quickly() {
  const auto before = Clock::now();
  ::sched_yield();
  const auto after = Clock::now();
  if (after - before < kQuickYield) {
    slow_yields.store(0, std::memory_order_relaxed);
    return true;
  }
  if (slow_yields.fetch_add(1, std::memory_order_relaxed) + 1 < kMostSlowYields) return true;
  slow_yields.store(0, std::memory_order_relaxed);
  yields_again_at.store((after + kTimeWithoutYields).time_since_epoch().count(), std::memory_order_relaxed);
  return false;
}

/// Tells the core that this is a spin loop. Once, since a pause takes up to 140 cycles on some cores.
inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

}  // namespace

void post(Signal& signal, std::uint32_t value) {
  // Sequentially consistent with the sleeper's count-then-look: one of the two sees the other.
  signal.value.store(value, std::memory_order_seq_cst);
  if (signal.sleepers.load(std::memory_order_seq_cst) != 0) futex_wake_all(signal.value);
}

void ring(Signal& signal) {
  signal.value.fetch_add(1, std::memory_order_seq_cst);
  if (signal.sleepers.load(std::memory_order_seq_cst) != 0) futex_wake_all(signal.value);
}

void nap(Signal& signal, std::uint32_t seen, std::chrono::milliseconds time) {
  signal.sleepers.fetch_add(1, std::memory_order_seq_cst);
  if (signal.value.load(std::memory_order_seq_cst) == seen) futex_wait(signal.value, seen, time);
  signal.sleepers.fetch_sub(1, std::memory_order_relaxed);
}

void doze(Signal& signal, std::uint32_t seen) {
  ::syscall(SYS_futex, &signal.value, FUTEX_WAIT, seen, nullptr, nullptr, 0);
}

void wake_one(Signal& signal) {
  futex_wake(signal.value, 1);
}

void wake_all(Signal& signal) {
  futex_wake_all(signal.value);
}

int usable_cores() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  if (::sched_getaffinity(0, sizeof(cores), &cores) == 0) return std::max(1, CPU_COUNT(&cores));
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

Patience Patience::of_caller(int ranks) {
  static const int cores = usable_cores();
  if (ranks <= cores) return {.spins = 500, .yields = 100};
  return {.spins = 0, .yields = 1000};
}

Patience Patience::of_background() {
  return {.spins = 50, .yields = 5};
}

bool stay_awake_for(const Signal& signal, std::uint32_t target, const Patience& patience) {
  for (int i = 0; i < patience.spins; ++i) {
    if (has_reached(signal, target)) return true;
    relax();
  }
  if (may_yield()) {
    for (int i = 0; i < patience.yields; ++i) {
      if (has_reached(signal, target)) return true;
      if (!yield_quickly()) break;
    }
  }
  return false;
}

void wait_for(Signal& signal, std::uint32_t target, const Patience& patience, Watch& watch) {
  if (stay_awake_for(signal, target, patience)) return;
  auto time = std::chrono::milliseconds(5);
  while (true) {
    const auto seen = signal.value.load(std::memory_order_acquire);
    if (has_reached(seen, target)) return;
    nap(signal, seen, time);
    if (has_reached(signal, target)) return;
    watch.check();
    time = std::min(time * 2, kLongestNap);
  }
}

}  // namespace lockstep::shm
