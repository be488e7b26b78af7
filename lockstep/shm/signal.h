// A counter that other ranks wait for, in memory they share. One rank counts up, any number wait.
//
// Waiting goes through three stages: look again at once (the peer is a few hundred nanoseconds away), give the core to
// somebody else, sleep in the kernel until the counter moves. How long each lasts depends on whether the ranks fit the
// cores: a rank that spins on a core another rank needs makes everybody wait.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace lockstep::shm {

struct alignas(64) Signal {
  std::atomic<std::uint32_t> value = 0;
  std::atomic<std::uint32_t> sleepers = 0;
};
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

/// Counters wrap; what counts is who is ahead, and nobody ever is by half the range.
inline bool has_reached(std::uint32_t value, std::uint32_t target) {
  return static_cast<std::int32_t>(value - target) >= 0;
}

inline bool has_reached(const Signal& signal, std::uint32_t target) {
  return has_reached(signal.value.load(std::memory_order_acquire), target);
}

/// Sets the counter and wakes whoever sleeps on it. Everything written before is seen by who waited.
void post(Signal& signal, std::uint32_t value);

/// Counts up by one; unlike post(), any number of ranks may.
void ring(Signal& signal);

/// Sleeps until the counter is no longer `seen`, or the time is over, or for no reason.
void nap(Signal& signal, std::uint32_t seen, std::chrono::milliseconds time);

/// Sleeps until the counter is no longer `seen` or wake_one() is called, without counting as a sleeper: for those who
/// keep their own books of who has to be woken.
void doze(Signal& signal, std::uint32_t seen);
/// Wakes one of those who doze.
void wake_one(Signal& signal);
void wake_all(Signal& signal);

/// How long to stay awake, in looks at the counter.
struct Patience {
  int spins = 0;
  int yields = 0;

  /// For a rank whose caller waits with it. `ranks` share this process's cores.
  static Patience of_caller(int ranks);
  /// For a background thread: its rank computes meanwhile and wants the core.
  static Patience of_background();
};

/// True as soon as the counter has reached `target`; false if the patience is over before.
bool stay_awake_for(const Signal& signal, std::uint32_t target, const Patience& patience);

/// Called between naps; throws to give up.
class Watch {
 public:
  virtual void check() = 0;

 protected:
  ~Watch() = default;
};

/// Returns when the counter has reached `target`, or throws what `watch` throws. It is asked within
/// `kLongestNap` of anything that happens.
void wait_for(Signal& signal, std::uint32_t target, const Patience& patience, Watch& watch);

inline constexpr std::chrono::milliseconds kLongestNap{50};

/// Cores this process may use.
int usable_cores();

}  // namespace lockstep::shm
