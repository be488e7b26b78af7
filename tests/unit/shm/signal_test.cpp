#include "lockstep/shm/signal.h"

#include <gtest/gtest.h>

#include <limits>
#include <stdexcept>
#include <thread>
#include <vector>

namespace lockstep::shm {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

// Sleeps at once.
constexpr Patience kNone{};

/// Counts how often it is asked, and gives up when told to.
class CountingWatch final : public Watch {
 public:
  explicit CountingWatch(int most = std::numeric_limits<int>::max()) : most_(most) {}
  void check() override {
    if (++checks >= most_) throw std::runtime_error("gave up");
  }
  int checks = 0;

 private:
  const int most_;
};

/// Runs `action` once somebody sleeps on `signal`.
std::thread when_asleep(Signal& signal, std::function<void()> action) {
  return std::thread([&signal, action = std::move(action)] {
    while (signal.sleepers.load() == 0) std::this_thread::yield();
    action();
  });
}

TEST(Signal, TellsWhoIsAheadAroundTheEndOfItsRange) {
  EXPECT_TRUE(has_reached(5U, 5U));
  EXPECT_TRUE(has_reached(6U, 5U));
  EXPECT_FALSE(has_reached(4U, 5U));
  EXPECT_TRUE(has_reached(0U, 0xffff'ffffU));
  EXPECT_TRUE(has_reached(3U, 0xffff'fff0U));
  EXPECT_FALSE(has_reached(0xffff'ffffU, 0U));
  EXPECT_FALSE(has_reached(0xffff'fff0U, 3U));
  EXPECT_TRUE(has_reached(0x7fff'ffffU, 0U));
}

TEST(Signal, ReturnsAtOnceWhatIsThere) {
  Signal signal;
  post(signal, 7);
  CountingWatch watch;
  wait_for(signal, 7, kNone, watch);
  wait_for(signal, 3, {.spins = 10, .yields = 10}, watch);
  EXPECT_EQ(watch.checks, 0);
}

TEST(Signal, WakesWhoSleeps) {
  for (const auto& patience : {kNone, Patience{.spins = 100, .yields = 100}, Patience::of_background()}) {
    Signal signal;
    int written = 0;
    auto poster = when_asleep(signal, [&] {
      written = 42;
      post(signal, 1);
    });
    CountingWatch watch;
    wait_for(signal, 1, patience, watch);
    EXPECT_EQ(written, 42);
    poster.join();
    EXPECT_EQ(signal.sleepers.load(), 0u);
  }
}

TEST(Signal, WakesAllWhoSleep) {
  Signal signal;
  std::vector<std::thread> waiters;
  for (std::uint32_t i = 1; i <= 5; ++i) {
    waiters.emplace_back([&signal, i] {
      CountingWatch watch;
      wait_for(signal, i, kNone, watch);
    });
  }
  while (signal.sleepers.load() < 5) std::this_thread::yield();
  for (std::uint32_t i = 1; i <= 5; ++i) post(signal, i);
  for (auto& waiter : waiters) waiter.join();
}

TEST(Signal, IsWaitedForAcrossTheEndOfItsRange) {
  Signal signal;
  const std::uint32_t start = 0xffff'fff0U;
  post(signal, start);
  std::thread poster([&] {
    for (std::uint32_t i = 1; i <= 32; ++i) {
      post(signal, start + i);
      std::this_thread::sleep_for(1ms);
    }
  });
  CountingWatch watch;
  for (std::uint32_t i = 1; i <= 32; ++i) wait_for(signal, start + i, kNone, watch);
  EXPECT_EQ(signal.value.load(), 16u);
  poster.join();
}

TEST(Signal, AsksTheWatchWhileItWaits) {
  Signal signal;
  CountingWatch watch;
  std::thread poster([&] {
    std::this_thread::sleep_for(400ms);
    post(signal, 1);
  });
  wait_for(signal, 1, kNone, watch);
  poster.join();
  // At least once in each longest nap, of which 400 ms have eight; loosely, for busy machines.
  EXPECT_GE(watch.checks, 3);
  EXPECT_LE(watch.checks, 100);
}

TEST(Signal, EndsTheWaitWithWhatTheWatchThrows) {
  Signal signal;
  CountingWatch watch(3);
  const auto start = Clock::now();
  EXPECT_THROW(wait_for(signal, 1, {.spins = 10, .yields = 10}, watch), std::runtime_error);
  EXPECT_LT(Clock::now() - start, 5s);
  EXPECT_EQ(watch.checks, 3);
  EXPECT_EQ(signal.sleepers.load(), 0u);
  // Usable as before.
  post(signal, 1);
  wait_for(signal, 1, kNone, watch);
}

TEST(Signal, LooksUpWhenTheSameValueIsPostedAgain) {
  Signal signal;
  CountingWatch watch(1);
  auto poster = when_asleep(signal, [&] { post(signal, 0); });
  EXPECT_THROW(wait_for(signal, 1, kNone, watch), std::runtime_error);
  poster.join();
}

TEST(Signal, CountsRingsOfManyThreads) {
  constexpr std::uint32_t kRings = 20'000;
  constexpr std::uint32_t kThreads = 4;
  Signal signal;
  std::vector<std::thread> ringers;
  for (std::uint32_t i = 0; i < kThreads; ++i) {
    ringers.emplace_back([&] {
      for (std::uint32_t ring_count = 0; ring_count < kRings; ++ring_count) ring(signal);
    });
  }
  CountingWatch watch;
  wait_for(signal, kThreads * kRings, Patience::of_background(), watch);
  for (auto& ringer : ringers) ringer.join();
  EXPECT_EQ(signal.value.load(), kThreads * kRings);
}

TEST(Signal, RingEndsANap) {
  Signal signal;
  auto ringer = when_asleep(signal, [&] { ring(signal); });
  const auto start = Clock::now();
  nap(signal, 0, 30s);
  EXPECT_LT(Clock::now() - start, 10s);
  ringer.join();
  // What has changed already is not slept on.
  nap(signal, 0, 30s);
  EXPECT_LT(Clock::now() - start, 10s);
}

TEST(Signal, NapEndsWhenItsTimeIsOver) {
  Signal signal;
  const auto start = Clock::now();
  nap(signal, 0, 20ms);
  EXPECT_LT(Clock::now() - start, 10s);
  EXPECT_EQ(signal.value.load(), 0u);
}

TEST(Patience, DoesNotSpinWhereRanksShareCores) {
  EXPECT_EQ(Patience::of_caller(usable_cores() + 1).spins, 0);
  EXPECT_GT(Patience::of_caller(1).spins, 0);
  EXPECT_GE(usable_cores(), 1);
}

}  // namespace
}  // namespace lockstep::shm
