// What survivors are told when a rank is killed, hangs or is late: a message that names it, within the timeout.
#include <signal.h>
#include <unistd.h>

#include <thread>

#include "lockstep/base/rank_local.h"
#include "lockstep/launch/port.h"
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

/// What becomes of the victim: it ends by itself, or rank 0 ends it when the survivors are done.
enum class Victim { kEnds, kStays };

/// Runs `doom` on rank 2 of 4 after a first collective that works; the others must fail in the next one and name
/// rank 2.
void expect_survivors_name_rank_two(const std::function<void()>& doom, std::chrono::milliseconds timeout,
                                    const std::function<void(const World&)>& collective,
                                    Victim victim = Victim::kEnds) {
  const auto report = run_processes_from_gtest(
      {.world_size = 4, .timeout = 30s, .collective_timeout = timeout, .expected_exit_code = kSawIt},
      [&](const World& world) {
        all_reduce(at::ones({3}), world.group());
        const auto process = std::stoi(broadcast_object(std::to_string(::getpid()), 2, world.group()));
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
        if (world.rank() == 0 && victim == Victim::kStays) {
          std::this_thread::sleep_for(2s);  // until the others have seen the same
          ::kill(process, SIGKILL);
        }
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
  expect_survivors_name_rank_two([] { std::this_thread::sleep_for(25s); }, 3s,
                                 [](const World& world) { all_reduce(at::ones({1000}), world.group()); },
                                 Victim::kStays);
}

TEST(Failure, OfAStoppedRankIsNamedInABarrier) {
  // The group's own timeout is far off: it is the barrier's that ends the wait.
  expect_survivors_name_rank_two([] { ::raise(SIGSTOP); }, 28s,
                                 [](const World& world) {
                                   const auto start = std::chrono::steady_clock::now();
                                   try {
                                     barrier(world.group(), 3s);
                                   } catch (...) {
                                     EXPECT_LT(std::chrono::steady_clock::now() - start, 12s);
                                     throw;
                                   }
                                 },
                                 Victim::kStays);
}

LOCKSTEP_PROCESS_TEST(Failure, OfAPeerDoesNotKillByABrokenPipe, 2) {
  // Gloo writes without asking for an error instead of a signal.
  struct sigaction now = {};
  ::sigaction(SIGPIPE, nullptr, &now);
  EXPECT_EQ(now.sa_handler, SIG_IGN);
}

TEST(Failure, IsToldToTheRankThatCameLate) {
  const auto report = run_processes_from_gtest(
      {.world_size = 3, .timeout = 120s, .collective_timeout = 3s, .expected_exit_code = kSawIt},
      [](const World& world) {
        barrier(world.group());
        if (world.rank() == 1) std::this_thread::sleep_for(6s);
        const auto message =
            expect_error([&] { all_reduce(at::ones({10}), world.group()); }, {"all_reduce(sum, Float[10])"});
        EXPECT_THAT(message, HasSubstr(world.rank() == 1 ? "every rank is alive, but gave up as well"
                                                         : "rank 1 is gone, hung or late"));
        if (!::testing::Test::HasFailure()) std::_Exit(kSawIt);
      });
  if (testing::is_rank_process()) return;
  EXPECT_TRUE(report.has_passed()) << report.describe();
}

/// A world beside the harness's whose store rank 0 serves, as under lockstep-run; the harness's own is a file.
World world_with_served_store(const World& outer, std::chrono::milliseconds timeout) {
  std::optional<PortReservation> port;
  if (outer.rank() == 0) port.emplace();
  const auto number = broadcast_object(port ? std::to_string(port->port()) : "", 0, outer.group());
  return init({.backend = "gloo",
               .timeout = timeout,
               .init_method = "tcp://127.0.0.1:" + number,
               .rank = outer.rank(),
               .world_size = outer.world_size()});
}

TEST(Failure, OfAKilledRankIsNamedWhenRankZeroServesTheStore) {
  const auto report =
      run_processes_from_gtest({.world_size = 4, .timeout = 60s, .expected_exit_code = kSawIt}, [](const World& outer) {
        RankScope scope;
        const EnterRank enter(scope);
        const auto world = world_with_served_store(outer, 15s);
        all_reduce(at::ones({3}), world.group());
        if (world.rank() == 2) ::raise(SIGKILL);
        expect_error([&] { all_reduce(at::ones({1000}), world.group()); }, {"rank 2 is gone, hung or late"});
        std::_Exit(kSawIt);
      });
  if (testing::is_rank_process()) return;
  for (const int rank : {0, 1, 3}) {
    EXPECT_EQ(report.ranks[rank].kind, testing::RankOutcome::Kind::kPassed) << report.describe();
  }
}

TEST(Failure, InASubgroupNamesRanksOfTheWorld) {
  const auto report = run_processes_from_gtest(
      {.world_size = 4, .timeout = 60s, .collective_timeout = 15s, .expected_exit_code = kSawIt},
      [](const World& world) {
        const auto odd = new_group(world.group(), {3, 1}, {.name = "odd"});
        barrier(world.group());
        if (world.rank() == 3) ::raise(SIGKILL);
        if (world.rank() == 1) {
          expect_error([&] { all_reduce(at::ones({5}), odd); },
                       {"rank 1 (1 of 2 in group 'odd')", "rank 3 is gone, hung or late"});
        }
        std::_Exit(kSawIt);
      });
  if (testing::is_rank_process()) return;
  EXPECT_EQ(report.ranks[1].kind, testing::RankOutcome::Kind::kPassed) << report.describe();
}

TEST(Failure, OfTheRankThatServesTheStoreIsNamed) {
  const auto report =
      run_processes_from_gtest({.world_size = 3, .timeout = 60s, .expected_exit_code = kSawIt}, [](const World& outer) {
        RankScope scope;
        const EnterRank enter(scope);
        const auto world = world_with_served_store(outer, 15s);
        all_reduce(at::ones({3}), world.group());
        if (world.rank() == 0) std::_Exit(kSawIt);
        expect_error([&] { all_reduce(at::ones({3}), world.group()); }, {"the store is gone", "rank 0"});
        std::_Exit(kSawIt);
      });
  if (testing::is_rank_process()) return;
  EXPECT_TRUE(report.has_passed()) << report.describe();
}

TEST(Failure, OfTheStoreWhileMakingAGroupIsNoticedAtOnce) {
  const auto report =
      run_processes_from_gtest({.world_size = 3, .timeout = 60s, .expected_exit_code = kSawIt}, [](const World& outer) {
        RankScope scope;
        const EnterRank enter(scope);
        const auto world = world_with_served_store(outer, 50s);
        if (world.rank() == 0) {
          // Not before the others have connected, too.
          barrier(world.group());
          std::this_thread::sleep_for(200ms);
          std::_Exit(kSawIt);
        }
        barrier(world.group());
        const auto start = std::chrono::steady_clock::now();
        expect_error([&] { new_group(world.group(), {0, 1, 2}); }, {"the store is gone"});
        EXPECT_LT(std::chrono::steady_clock::now() - start, 20s);
        if (!::testing::Test::HasFailure()) std::_Exit(kSawIt);
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
