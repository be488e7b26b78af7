// What survivors are told when a rank is killed, hangs or is late: a message that names it, within the timeout.
#include <signal.h>
#include <unistd.h>

#include <thread>

#include "lockstep/base/rank_local.h"
#include "lockstep/lockstep.h"
#include "lockstep/testing/gtest.h"

namespace lockstep {
namespace {

using testing::expect_error;
using ::testing::HasSubstr;
using testing::run_processes_from_gtest;
using namespace std::chrono_literals;

/// Survivors end with this once they saw the message they should see; the victim ends as it ends.
constexpr int kSawIt = 42;

/// Runs `doom` on rank 2 of 4 after a first collective that works; the others must fail in the next one and name
/// rank 2.
void expect_survivors_name_rank_two(const std::function<void()>& doom, std::chrono::milliseconds timeout,
                                    const std::function<void(const World&)>& collective) {
  const auto report = run_processes_from_gtest(
      // A stopped rank never ends by itself; the survivors are done long before this is over.
      {.world_size = 4, .timeout = 30s, .collective_timeout = timeout, .expected_exit_code = kSawIt},
      [&](const World& world) {
        all_reduce(at::ones({3}), world.group());
        if (world.rank() == 2) {
          doom();
          std::_Exit(kSawIt);
        }
        const auto start = std::chrono::steady_clock::now();
        const auto message =
            expect_error([&] { collective(world); }, {"rank " + std::to_string(world.rank()) + " of 4"});
        const auto took = std::chrono::steady_clock::now() - start;
        // Both sides of the verdict: rank 2 is named, and nobody else is.
        EXPECT_THAT(message, HasSubstr("rank 2 is gone, hung or late"));
        EXPECT_LT(took, timeout + 5s) << message;
        // A group that failed says so at once.
        expect_error([&] { all_reduce(at::ones({1}), world.group()); }, {"can no longer be used"});
        if (!::testing::Test::HasFailure()) std::_Exit(kSawIt);
      });
  if (testing::is_rank_process()) return;
  for (const int rank : {0, 1, 3}) {
    EXPECT_EQ(report.ranks[rank].kind, testing::RankOutcome::Kind::kPassed) << report.describe();
  }
}

TEST(Failure, OfAKilledRankIsNamedByTheSurvivors) {
  expect_survivors_name_rank_two([] { ::raise(SIGKILL); }, 15s,
                                 [](const World& world) { all_reduce(at::ones({1000}), world.group()); });
}

TEST(Failure, OfAKilledRankIsNamedInABarrier) {
  expect_survivors_name_rank_two([] { ::raise(SIGKILL); }, 15s, [](const World& world) { barrier(world.group()); });
}

TEST(Failure, OfAHungRankIsNamedAfterTheTimeout) {
  expect_survivors_name_rank_two([] { std::this_thread::sleep_for(12s); }, 3s,
                                 [](const World& world) { all_reduce(at::ones({1000}), world.group()); });
}

TEST(Failure, OfAStoppedRankIsNamedInABarrier) {
  expect_survivors_name_rank_two([] { ::raise(SIGSTOP); }, 3s, [](const World& world) { barrier(world.group(), 3s); });
}

TEST(Failure, IsToldToTheRankThatCameLate) {
  const auto report = run_processes_from_gtest(
      {.world_size = 3, .timeout = 120s, .collective_timeout = 3s, .expected_exit_code = kSawIt},
      [](const World& world) {
        barrier(world.group());
        if (world.rank() == 1) std::this_thread::sleep_for(6s);
        const auto message =
            expect_error([&] { all_reduce(at::ones({10}), world.group()); }, {"all_reduce(sum, Float[10])"});
        EXPECT_THAT(message, HasSubstr(world.rank() == 1 ? "failed" : "rank 1 is gone, hung or late"));
        if (!::testing::Test::HasFailure()) std::_Exit(kSawIt);
      });
  if (testing::is_rank_process()) return;
  EXPECT_TRUE(report.has_passed()) << report.describe();
}

TEST(Failure, OfTheRankThatServesTheStoreIsNamed) {
  // lockstep-run's worlds meet at rank 0's store; the test kit's meet at a file, so make one of the first kind.
  const auto report = run_processes_from_gtest(
      {.world_size = 3, .timeout = 120s, .expected_exit_code = kSawIt}, [](const World& world) {
        const auto port = broadcast_object(std::to_string(20000 + ::getpid() % 10000), 0, world.group());
        const StorePtr tcp =
            rendezvous("tcp://127.0.0.1:" + port, {.launcher = "test", .rank = world.rank(), .world_size = 3}, 20s);
        RankScope scope;
        const EnterRank enter(scope);
        const auto inner =
            init({.backend = "gloo", .timeout = 20s, .rank = world.rank(), .world_size = 3, .store = tcp});
        all_reduce(at::ones({3}), inner.group());
        if (world.rank() == 0) std::_Exit(kSawIt);
        expect_error([&] { all_reduce(at::ones({3}), inner.group()); }, {"the store is gone", "rank 0"});
        std::_Exit(kSawIt);
      });
  if (testing::is_rank_process()) return;
  EXPECT_TRUE(report.has_passed()) << report.describe();
}

TEST(Failure, WhileMakingAGroupNamesTheAbsentRank) {
  const auto report = run_processes_from_gtest(
      {.world_size = 3, .timeout = 120s, .collective_timeout = 2s, .expected_exit_code = kSawIt},
      [](const World& world) {
        if (world.rank() == 1) {
          std::this_thread::sleep_for(6s);
          std::_Exit(kSawIt);
        }
        expect_error([&] { new_group(world.group(), {0, 1, 2}); },
                     {"making group", "rank 1 did not come within 2000 ms"});
        std::_Exit(kSawIt);
      });
  if (testing::is_rank_process()) return;
  EXPECT_TRUE(report.has_passed()) << report.describe();
}

}  // namespace
}  // namespace lockstep
