// Join among processes: totals, and what the others are told when a rank leaves by an exception, by backend.
#include <stdlib.h>

#include <thread>

#include "lockstep/base/rank_local.h"
#include "lockstep/launch/port.h"
#include "tests/support/join_fixtures.h"

namespace lockstep {
namespace {

using namespace join_fixtures;
using namespace std::chrono_literals;
using testing::expect_error;
using testing::run_processes_from_gtest;

/// Ranks end with this once they saw what they should see: a gloo group that failed is not destroyed in time.
constexpr int kSawIt = 42;

class JoinProcesses : public ::testing::TestWithParam<std::string> {};

INSTANTIATE_TEST_SUITE_P(Backends, JoinProcesses, ::testing::Values("gloo", "shm"),
                         [](const auto& info) { return info.param; });

// JOIN-49
TEST_P(JoinProcesses, EveryRankSumsWhatTheLiveRanksGive) {
  testing::run_processes_in_gtest({.world_size = 3, .backend = GetParam()}, [](const World& world) {
    AllReducer one(world.group());
    AllReducer two(world.group());
    for (int round = 0; round < 3; ++round) {
      double total = 0;
      const auto report = Join({&one, &two}).run([&] {
        for (int i = 0; i < 3 + world.rank(); ++i) {
          // The last rank is late in every iteration, the first ranks are out early.
          if (world.rank() == 2) std::this_thread::sleep_for(20ms);
          total += one() + two();
        }
      });
      EXPECT_EQ(total, 2 * expected_total(world.rank(), 3));
      EXPECT_EQ(report.authoritative_rank, 2);
      EXPECT_EQ(one.final_value.item<double>(), kAfter);
    }
  });
}

struct Doom {
  int rank = 1;
  bool has_trained = true;
  bool is_guard = false;
  /// How long the process stays after the exception.
  std::chrono::seconds stays{0};
};

/// What each of three ranks does when `doom.rank` leaves the scope by an exception: the others throw naming it, well
/// before any timeout and before its process ends if it stays. Ends the process.
void fail_and_be_told(const World& world, const GroupPtr& group, const Doom& doom) {
  AllReducer reducer(group);
  barrier(group);
  const auto train = [&](int iterations) {
    for (int i = 0; i < iterations; ++i) reducer();
  };
  const auto name = "rank " + std::to_string(doom.rank) + " left by an exception";
  if (world.rank() == doom.rank) {
    const auto fail = [&] {
      if (doom.has_trained) train(2);
      throw std::invalid_argument("the batch is odd");
    };
    try {
      Join scope({&reducer});
      if (doom.is_guard) fail();
      scope.run(fail);
    } catch (const std::invalid_argument& error) {
      EXPECT_STREQ(error.what(), "the batch is odd");
    }
    expect_error([&] { all_reduce(at::ones({1}), group); }, {name});
    std::this_thread::sleep_for(doom.stays);
  } else {
    const auto start = std::chrono::steady_clock::now();
    // One of the two has joined by then, the other is live.
    const bool is_live = world.rank() == 2;
    const int iterations = is_live ? 4 : doom.has_trained ? 2 : 0;
    expect_error([&] { Join({&reducer}).run([&] { train(iterations); }); },
                 {name + (doom.is_guard ? "" : ": the batch is odd")});
    EXPECT_LT(std::chrono::steady_clock::now() - start, doom.stays > 0s ? doom.stays - 1s : 5s);
    expect_error([&] { all_reduce(at::ones({1}), group); }, {name});
  }
  if (!::testing::Test::HasFailure()) std::_Exit(kSawIt);
}

void expect_others_are_told(const std::string& backend, const Doom& doom) {
  const auto report = run_processes_from_gtest(
      {.world_size = 3, .backend = backend, .timeout = 60s, .collective_timeout = 50s, .expected_exit_code = kSawIt},
      [&](const World& world) { fail_and_be_told(world, world.group(), doom); });
  if (testing::is_rank_process()) return;
  EXPECT_TRUE(report.has_passed()) << report.describe();
}

// JOIN-56, JOIN-24
TEST_P(JoinProcesses, AnExceptionOfARankIsToldToTheOthers) {
  expect_others_are_told(GetParam(), {});
}

// JOIN-56
TEST_P(JoinProcesses, AnExceptionOfARankThatLivesOnIsToldToTheOthers) {
  expect_others_are_told(GetParam(), {.stays = 4s});
}

// JOIN-56
TEST_P(JoinProcesses, AnExceptionBeforeTheFirstIterationIsToldToTheOthers) {
  expect_others_are_told(GetParam(), {.has_trained = false});
}

// JOIN-56, JOIN-28
TEST_P(JoinProcesses, AnExceptionThroughAGuardIsToldToTheOthers) {
  expect_others_are_told(GetParam(), {.is_guard = true});
}

// JOIN-56
TEST_P(JoinProcesses, AnExceptionOfTheRankThatServesTheStoreIsToldToTheOthers) {
  const auto report =
      run_processes_from_gtest({.world_size = 3, .timeout = 60s, .expected_exit_code = kSawIt}, [](const World& outer) {
        RankScope scope;
        const EnterRank enter(scope);
        std::optional<PortReservation> port;
        if (outer.rank() == 0) port.emplace();
        const auto number = broadcast_object(port ? std::to_string(port->port()) : "", 0, outer.group());
        const auto world = init({.backend = GetParam(),
                                 .timeout = 50s,
                                 .init_method = "tcp://127.0.0.1:" + number,
                                 .rank = outer.rank(),
                                 .world_size = outer.world_size()});
        fail_and_be_told(world, world.group(), {.rank = 0});
      });
  if (testing::is_rank_process()) return;
  EXPECT_TRUE(report.has_passed()) << report.describe();
}

// JOIN-56
TEST(JoinHosts, AnExceptionOfARankIsToldOnAllHosts) {
  for (const int failing : {0, 1}) {
    const auto report = run_processes_from_gtest(
        {.world_size = 3, .backend = "gloo", .timeout = 60s, .expected_exit_code = kSawIt},
        [&](const World& world) {
          // Pretended: ranks 0 and 1 on one host, rank 2 on another.
          ::setenv("LOCKSTEP_HOST_ID", world.rank() == 2 ? "there" : "here", 1);
          const auto group = new_group(world.group(), {0, 1, 2}, {.backend = "shm", .timeout = 50s, .name = "hosts"});
          EXPECT_EQ(group->getBackend(c10::kCPU)->getBackendName(), "hierarchical");
          fail_and_be_told(world, group, {.rank = failing, .stays = 4s});
        },
        "rank " + std::to_string(failing));
    if (testing::is_rank_process()) continue;
    EXPECT_TRUE(report.has_passed()) << report.describe();
  }
}

// JOIN-19, JOIN-56
TEST_P(JoinProcesses, AnEarlyStopIsNoFailure) {
  testing::run_processes_in_gtest({.world_size = 3, .backend = GetParam()}, [](const World& world) {
    AllReducer reducer(world.group());
    for (int round = 0; round < 2; ++round) {
      int completed = 0;
      expect_error(
          [&] {
            Join({&reducer}, {.throw_on_early_termination = true}).run([&] {
              for (; completed < 3 + world.rank(); ++completed) reducer();
            });
          },
          {"rank 0 ran out of inputs", "all ranks stop"});
      EXPECT_EQ(completed, 3);
    }
    barrier(world.group());
  });
}

}  // namespace
}  // namespace lockstep
