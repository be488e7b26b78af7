// Ranks as processes: what the harness promises.
#include <signal.h>
#include <unistd.h>

#include <fstream>
#include <thread>

#include "lockstep/comm/backend_registry.h"
#include "lockstep/lockstep.h"
#include "lockstep/testing/gtest.h"
#include "lockstep/testing/reset.h"
#include "lockstep/testing/seeds.h"
#include "lockstep/testing/temp_dir.h"

namespace lockstep {
namespace {

using ::testing::HasSubstr;
using testing::RankOutcome;
using testing::run_processes_from_gtest;
using namespace std::chrono_literals;

// TEST-1, TEST-3: a fresh process per rank, told who it is, in a world that works.
LOCKSTEP_PROCESS_TEST(ProcessRanks, AreFreshProcessesThatMeet, 3) {
  const auto pids = all_gather_object(std::to_string(::getpid()), world.group());
  EXPECT_EQ(std::set<std::string>(pids.begin(), pids.end()).size(), 3U);
  EXPECT_EQ(std::getenv("LOCKSTEP_TEST_RANK"), std::to_string(world.rank()));
  EXPECT_EQ(std::string(std::getenv("LOCKSTEP_TEST_CALL")), "ProcessRanks.AreFreshProcessesThatMeet");
  EXPECT_EQ(world.world_size(), 3);
}

// TEST-3: a rank's steps come in this order; the group works in set-up, body and tear-down.
TEST(ProcessRanks, TakeTheirStepsInOrder) {
  std::string steps;
  const testing::ResetHook hook([&] { steps += "reset "; });
  const auto step = [&](const char* name) {
    return [&steps, name](const World& world) {
      EXPECT_EQ(world.device().is_cpu(), testing::device_count() == 0);
      barrier(world.group());
      steps += std::string(name) + " ";
    };
  };
  const auto report = run_processes_from_gtest(
      {.world_size = 2,
       .set_up = step("set-up"),
       .tear_down =
           [&](const World& world) {
             step("tear-down")(world);
             EXPECT_EQ(steps, "reset set-up body tear-down ");
           }},
      [&](const World& world) {
        // Seeds come after set-up, so set-up cannot shift them.
        EXPECT_TRUE(testing::rank_randn({3}).equal(at::randn({3}, at::detail::createCPUGenerator(testing::kTestSeed))));
        step("body")(world);
      });
  EXPECT_TRUE(report.has_passed()) << report.describe();
}

// TEST-1, TEST-6: an exit code of 0 is no pass if the body did not run to its end.
TEST(ProcessRanks, DoNotPassWithoutFinishingTheBody) {
  const auto report = run_processes_from_gtest({.world_size = 2}, [](const World&) { std::exit(0); });
  EXPECT_FALSE(report.has_passed());
  EXPECT_THAT(report.describe(), HasSubstr("did not finish the test's body"));
}

// TEST-1: shards and filters of the parent do not reach the ranks.
TEST(ProcessRanks, DoNotInheritTheFrameworksVariables) {
  if (!testing::is_rank_process()) ::setenv("GTEST_SHARD_INDEX", "1", 1);
  if (!testing::is_rank_process()) ::setenv("GTEST_TOTAL_SHARDS", "2", 1);
  const auto report = run_processes_from_gtest(
      {.world_size = 1}, [](const World&) { EXPECT_EQ(std::getenv("GTEST_TOTAL_SHARDS"), nullptr); });
  ::unsetenv("GTEST_SHARD_INDEX");
  ::unsetenv("GTEST_TOTAL_SHARDS");
  EXPECT_TRUE(report.has_passed()) << report.describe();
}

// TEST-2: four ranks over gloo without GPUs, one per GPU with them.
TEST(ProcessRanks, ChooseWorldSizeAndBackendFromTheMachine) {
  const auto options = testing::with_defaults({}, /*as_processes=*/true);
  const int gpus = testing::device_count();
  EXPECT_EQ(options.world_size, gpus == 0 ? 4 : std::min(gpus, 8));
  EXPECT_EQ(options.timeout, 300s);
  const bool has_nccl = gpus > 0 && is_backend_registered("nccl");
  EXPECT_EQ(options.backend, has_nccl ? "cpu:gloo,cuda:nccl" : "gloo");
  EXPECT_EQ(testing::with_defaults({.world_size = 7}, true).world_size, 7);
  EXPECT_EQ(testing::with_defaults({.world_size = gpus + 1}, true).backend, "gloo");
}

// TEST-4: the store file is the run's own and is gone afterwards, also after a failure.
TEST(ProcessRanks, RemoveTheirStoreFile) {
  std::optional<testing::TempDir> seen;
  if (!testing::is_rank_process()) {
    seen.emplace();
    ::setenv("LOCKSTEP_TEST_NOTE", seen->file("path").c_str(), 1);
  }
  for (const bool fails : {false, true}) {
    const auto report = run_processes_from_gtest(
        {.world_size = 2},
        [&](const World& world) {
          if (world.rank() == 0) std::ofstream(std::getenv("LOCKSTEP_TEST_NOTE")) << std::getenv("LOCKSTEP_TEST_STORE");
          barrier(world.group());
          if (fails) throw std::runtime_error("on purpose");
        },
        fails ? "fails" : "passes");
    if (testing::is_rank_process()) continue;
    EXPECT_EQ(report.has_passed(), !fails) << report.describe();
    std::string path;
    std::ifstream(seen->file("path")) >> path;
    EXPECT_FALSE(path.empty());
    EXPECT_NE(::access(path.c_str(), F_OK), 0) << path;
    EXPECT_NE(::access(path.substr(0, path.rfind('/')).c_str(), F_OK), 0) << path;
  }
}

// TEST-4: two runs at once do not meet.
TEST(ProcessRanks, RunTwiceAtOnceWithoutMeeting) {
  const auto body = [](const World& world) {
    auto tensor = at::ones({1});
    for (int i = 0; i < 20; ++i) all_reduce(tensor, world.group(), ReduceOp::AVG);
    EXPECT_EQ(tensor.item<float>(), 1);
  };
  const auto first = testing::call_from_gtest("first");
  const auto second = testing::call_from_gtest("second");
  testing::RunReport one;
  testing::RunReport two;
  if (testing::is_rank_process()) {
    one = testing::run_processes({.world_size = 2}, first, testing::with_gtest_results(body));
    two = testing::run_processes({.world_size = 2}, second, testing::with_gtest_results(body));
    return;
  }
  std::thread other([&] { one = testing::run_processes({.world_size = 2}, first, body); });
  two = testing::run_processes({.world_size = 2}, second, body);
  other.join();
  EXPECT_TRUE(one.has_passed()) << one.describe();
  EXPECT_TRUE(two.has_passed()) << two.describe();
}

// TEST-5: the text and stack of a rank that throws reach the parent; the others are stopped.
TEST(ProcessRanks, SendTheErrorOfARankThatThrows) {
  const auto report = run_processes_from_gtest({.world_size = 3}, [](const World& world) {
    TORCH_CHECK(world.rank() != 2, "rank two says no");
    std::this_thread::sleep_for(60s);
  });
  EXPECT_FALSE(report.has_passed());
  EXPECT_EQ(report.ranks[2].kind, RankOutcome::Kind::kFailed);
  EXPECT_THAT(report.ranks[2].text, HasSubstr("rank two says no"));
  EXPECT_THAT(report.ranks[2].text, HasSubstr("frame #0"));
  EXPECT_EQ(report.ranks[0].kind, RankOutcome::Kind::kStopped);
  EXPECT_EQ(report.ranks[1].kind, RankOutcome::Kind::kStopped);
  // Where logs are cut, the rank that failed is what is left.
  EXPECT_LT(report.describe().find("rank 2 failed"), report.describe().find("rank 0 was stopped"));
  EXPECT_THAT(report.ranks[0].text, HasSubstr("  #11 "));
  EXPECT_THAT(report.ranks[0].text, ::testing::Not(HasSubstr("  #12 ")));
}

// TEST-5: the exit code of a rank that throws is 10.
TEST(ProcessRanks, EndWithCodeTenAfterAnError) {
  const auto report = run_processes_from_gtest({.world_size = 2, .expected_exit_code = 10},
                                               [](const World&) { throw std::runtime_error("as expected"); });
  EXPECT_TRUE(report.has_passed()) << report.describe();
  EXPECT_EQ(testing::kFailedExitCode, 10);
}

// TEST-5: every failed rank's text is shown.
TEST(ProcessRanks, ShowTheTextOfEveryFailedRank) {
  const auto report = run_processes_from_gtest({.world_size = 2, .expected_exit_code = 0}, [](const World& world) {
    throw std::runtime_error("rank " + std::to_string(world.rank()) + " is unhappy");
  });
  EXPECT_FALSE(report.has_passed());
  EXPECT_THAT(report.describe(), HasSubstr("rank 0 is unhappy"));
  EXPECT_THAT(report.describe(), HasSubstr("rank 1 is unhappy"));
}

// TEST-5: assertions of the framework reach the parent with file and line.
TEST(ProcessRanks, SendFailedAssertions) {
  const auto report =
      run_processes_from_gtest({.world_size = 2}, [](const World& world) { EXPECT_EQ(world.rank(), 0); });
  if (testing::is_rank_process()) return;
  EXPECT_FALSE(report.has_passed());
  EXPECT_THAT(report.ranks[1].text, HasSubstr("process_ranks_test.cpp:"));
}

// TEST-6: a mix of pass and skip, a signal, and an unexpected code are failures.
TEST(ProcessRanks, FailUnlessTheyEndAlike) {
  const auto mixed = run_processes_from_gtest(
      {.world_size = 2},
      [](const World& world) {
        barrier(world.group());
        if (world.rank() == 0) throw testing::Skip{testing::SkipCode::kFeatureMissing, "not here"};
        std::_Exit(0);
      },
      "mixed");
  EXPECT_FALSE(mixed.has_passed()) << mixed.describe();

  const auto killed = run_processes_from_gtest(
      {.world_size = 2},
      [](const World& world) {
        if (world.rank() == 1) ::raise(SIGKILL);
        std::this_thread::sleep_for(60s);
      },
      "killed");
  EXPECT_FALSE(killed.has_passed());
  EXPECT_THAT(killed.describe(), HasSubstr("signal 9"));

  const auto code = run_processes_from_gtest({.world_size = 2}, [](const World&) { std::_Exit(3); }, "code");
  EXPECT_FALSE(code.has_passed());
  EXPECT_THAT(code.describe(), HasSubstr("exit code 3"));
}

// TEST-6: a test may declare the code it expects.
TEST(ProcessRanks, MayExpectACode) {
  const auto report =
      run_processes_from_gtest({.world_size = 2, .expected_exit_code = 3}, [](const World&) { std::_Exit(3); });
  EXPECT_TRUE(report.has_passed()) << report.describe();
}

// TEST-7: the report says which ranks hung, what they did last and where they are.
TEST(ProcessRanks, SayWhoHangsAndWhere) {
  // The limit counts from the start of the processes. On a busy machine they may not have come to the body by then.
  for (const auto limit : {6s, 20s, 60s}) {
    const auto label = std::to_string(limit.count());
    const auto report = run_processes_from_gtest(
        {.world_size = 2, .timeout = limit},
        [](const World& world) {
          auto tensor = at::ones({11});
          all_reduce(tensor, world.group());
          if (world.rank() == 1) std::this_thread::sleep_for(100s);
          all_reduce(tensor, world.group());
        },
        label);
    if (testing::is_rank_process()) continue;
    EXPECT_FALSE(report.has_passed());
    if (limit < 60s && report.describe().find("done all_reduce, 44 bytes") == std::string::npos) continue;
    EXPECT_THAT(report.problem, HasSubstr("did not end within " + label + "000 ms; rank 0, 1 still ran"));
    EXPECT_EQ(report.ranks[1].kind, RankOutcome::Kind::kHung);
    EXPECT_THAT(report.ranks[1].text, HasSubstr("sleep"));
    EXPECT_THAT(report.ranks[0].text, HasSubstr("launch all_reduce, 44 bytes Float"));
    break;
  }
}

// TEST-7: the time limit can be set for all tests by environment.
TEST(ProcessRanks, TakeTheTimeLimitFromTheEnvironment) {
  ::setenv("LOCKSTEP_TEST_TIMEOUT", "17", 1);
  EXPECT_EQ(testing::with_defaults({}, true).timeout, 17s);
  EXPECT_EQ(testing::with_defaults({.timeout = 2s}, true).timeout, 2s);
  ::unsetenv("LOCKSTEP_TEST_TIMEOUT");
}

// TEST-8: after an error the group is not destroyed, so a pending collective cannot keep the rank from ending.
TEST(ProcessRanks, EndAfterAnErrorWithACollectiveStillPending) {
  const auto start = std::chrono::steady_clock::now();
  const auto report = run_processes_from_gtest({.world_size = 2, .timeout = 60s}, [](const World& world) {
    auto tensor = at::ones({4});
    if (world.rank() == 1) {
      std::this_thread::sleep_for(100s);
    }
    auto pending = launch_all_reduce(tensor, world.group());
    throw std::runtime_error("the loss is NaN");
  });
  EXPECT_LT(std::chrono::steady_clock::now() - start, 40s);
  EXPECT_THAT(report.ranks[0].text, HasSubstr("the loss is NaN"));
  EXPECT_EQ(report.ranks[1].kind, RankOutcome::Kind::kStopped);
}

TEST(ProcessRanks, FailByTheirOwnErrorAlsoIfTheyWereAboutToBeStopped) {
  const auto report = run_processes_from_gtest({.world_size = 4}, [](const World& world) {
    barrier(world.group());
    throw std::runtime_error(std::string("rank ") + std::to_string(world.rank()) + " says no");
  });
  if (testing::is_rank_process()) return;
  for (int rank = 0; rank < 4; ++rank) {
    const auto& outcome = report.ranks[rank];
    const bool said_no = outcome.text.starts_with("rank " + std::to_string(rank) + " says no");
    EXPECT_EQ(outcome.kind == RankOutcome::Kind::kFailed, said_no) << report.describe();
  }
}

/// A stream whose last flush is the moment at which its process is stopped.
struct StopsWhenFlushed : std::streambuf {
  int sync() override { return ::raise(SIGTERM); }
};

// TEST-5: one that has reported keeps its outcome, also if it is stopped before it has ended.
TEST(ProcessRanks, AreNotStoppedOnceTheyHaveReported) {
  const auto report = run_processes_from_gtest({.world_size = 1}, [](const World&) {
    static StopsWhenFlushed stops;
    std::cout.rdbuf(&stops);
    throw std::runtime_error("rank 0 says no");
  });
  EXPECT_THAT(report.ranks[0].text, ::testing::StartsWith("rank 0 says no"));
  EXPECT_THAT(report.ranks[0].text, ::testing::Not(HasSubstr("it did last")));
}

// TEST-8: NCCL's desync debugging is off in ranks.
LOCKSTEP_PROCESS_TEST(ProcessRanks, RunWithoutNcclDesyncDebugging, 1) {
  EXPECT_STREQ(std::getenv("TORCH_NCCL_DESYNC_DEBUG"), "0");
}

// TEST-22: a skip has a reason and a code, alike on all ranks.
TEST(ProcessRanks, PassSkipsOnWithTheirReason) {
  const auto report =
      run_processes_from_gtest({.world_size = 3}, [](const World& world) { testing::skip_if_world_is_odd(world); });
  ASSERT_TRUE(report.skipped().has_value()) << report.describe();
  EXPECT_EQ(*report.skipped(), "needs an even number of ranks, the world has 3");
}

// TEST-22: each kind of skip has a code of its own.
TEST(Skips, HaveReasonsAndCodes) {
  const auto code_of = [](const std::function<void()>& skip) {
    try {
      skip();
    } catch (const testing::Skip& thrown) {
      EXPECT_FALSE(thrown.reason.empty());
      return static_cast<int>(thrown.code);
    }
    return 0;
  };
  EXPECT_EQ(code_of([] { testing::skip_unless_backend("no such backend"); }), 72);
  EXPECT_EQ(code_of([] { testing::skip_if_fewer_devices_than(1000); }), 76);
  {
    const auto alone = init();
    EXPECT_EQ(code_of([&] { testing::skip_if_world_smaller_than(alone, 2); }), 73);
    EXPECT_EQ(code_of([&] { testing::skip_if_world_smaller_than(alone, 1); }), 0);
    EXPECT_EQ(code_of([&] { testing::skip_if_world_is_odd(alone); }), 74);
  }
  EXPECT_EQ(code_of([] { testing::skip_unless_accelerator(); }), testing::device_count() == 0 ? 75 : 0);
  EXPECT_EQ(code_of([] { testing::skip_unless_feature(false, "a unicorn"); }), 77);
  EXPECT_EQ(code_of([] { testing::skip_unless_feature(true, "a horse"); }), 0);
  EXPECT_EQ(code_of([] { testing::skip_unless_backend("gloo"); }), 0);
  EXPECT_TRUE(testing::is_skip_code(72) && testing::is_skip_code(77));
  EXPECT_FALSE(testing::is_skip_code(0) || testing::is_skip_code(testing::kFailedExitCode));
}

// TEST-19, TEST-15: the same body in both harnesses, with the same random numbers: what rank 1 draws is fixed here, so
// threads that took numbers from each other would show.
LOCKSTEP_RANK_TEST(BothHarnesses, DrawTheSameNumbers, 3) {
  auto generator = at::detail::createCPUGenerator(testing::kTestSeed);
  for (int i = 0; i < 8; ++i) {
    EXPECT_TRUE(testing::rank_randn({8}).equal(at::randn({8}, generator))) << "draw " << i;
    all_reduce(at::ones({1}), world.group());
  }
}

/// A suite whose tests share one set of processes.
class Continuous : public testing::ContinuousTest<Continuous> {
 public:
  static testing::RunOptions options() { return {.world_size = 2}; }
};

// TEST-9: workers, group and process live on over the tests; seeds start anew.
TEST_F(Continuous, KeepsItsRanksOverTests) {
  run([](const World& world) {
    ::setenv("LOCKSTEP_TEST_SEEN", "first", 1);
    testing::rank_randn({5});
    auto tensor = at::ones({1});
    all_reduce(tensor, world.group());
    EXPECT_EQ(tensor.item<float>(), 2);
  });
}

// TEST-9
TEST_F(Continuous, KeepsItsRanksOverTestsStill) {
  run([](const World& world) {
    EXPECT_STREQ(std::getenv("LOCKSTEP_TEST_SEEN"), "first");
    const auto fresh = at::randn({5}, at::detail::createCPUGenerator(testing::kTestSeed));
    EXPECT_TRUE(testing::rank_randn({5}).equal(fresh));
    barrier(world.group());
  });
}

// TEST-9: after one failure the rest are skipped, saying why.
TEST(ContinuousRanks, SkipTheRestAfterAFailure) {
  testing::ContinuousRanks ranks({.world_size = 2}, testing::call_from_gtest());
  const auto good = ranks.run("good", [](const World& world) { barrier(world.group()); });
  const auto bad = ranks.run("bad", [](const World& world) { TORCH_CHECK(world.rank() == 0, "rank one fell over"); });
  const auto after = ranks.run("after", [](const World&) {});
  if (testing::is_rank_process()) return;
  EXPECT_TRUE(good.has_passed()) << good.describe();
  EXPECT_FALSE(bad.has_passed());
  EXPECT_THAT(bad.describe(), HasSubstr("rank one fell over"));
  ASSERT_TRUE(after.skipped().has_value());
  EXPECT_THAT(*after.skipped(), HasSubstr("bad failed"));
}

}  // namespace
// TEST-2
TEST(ProcessRanks, SeveralCallsOfOneTestRunTheirOwnBodies) {
  for (int call = 0; call < 3; ++call) {
    const auto report = run_processes_from_gtest({.world_size = 1}, [&](const World& /*world*/) {
      if (call == 1) throw std::runtime_error("the second one");
    });
    if (testing::is_rank_process()) continue;  // on its way to another call
    EXPECT_EQ(report.has_passed(), call != 1) << report.describe();
  }
}

}  // namespace lockstep
