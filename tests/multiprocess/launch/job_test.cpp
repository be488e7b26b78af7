#include "lockstep/launch/job.h"

#include <csignal>
#include <cstdlib>
#include <map>
#include <stdexcept>
#include <system_error>
#include <thread>

#include "lockstep/base/str.h"
#include "tests/multiprocess/launch/processes.h"
#include "tests/unit/launch/time_limit.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds;
using testing_internal::eventually;
using testing_internal::Mark;
using testing_internal::TemporaryDirectory;
using Lines = std::vector<std::string>;

// Ranks that run one script each; $RANK tells them who they are.
JobOptions job_of(const std::vector<std::string>& scripts) {
  JobOptions options;
  for (std::size_t i = 0; i < scripts.size(); ++i) {
    const int rank = static_cast<int>(i);
    options.ranks.push_back({rank, {"/bin/sh", "-c", scripts[i]}, {{"RANK", std::to_string(rank)}}});
  }
  return options;
}

TEST(Job, DeliversTheLinesOfEachRankInOrder) {
  auto options = job_of({"echo a; echo b >&2; printf c", "echo d"});
  std::map<std::pair<int, OutputStream>, Lines> lines;
  options.on_line = [&](int rank, OutputStream stream, std::string_view line) {
    lines[{rank, stream}].emplace_back(line);
  };
  const auto result = Job(std::move(options)).run();
  EXPECT_TRUE(result.ok());
  EXPECT_EQ((lines[{0, OutputStream::kStdout}]), (Lines{"a", "c"}));
  EXPECT_EQ((lines[{0, OutputStream::kStderr}]), Lines{"b"});
  EXPECT_EQ((lines[{1, OutputStream::kStdout}]), Lines{"d"});
}

TEST(Job, KeepsOnlyTheLastLines) {
  auto options = job_of({"seq 1 100"});
  options.keep_last_lines = 3;
  EXPECT_EQ(Job(std::move(options)).run().at(0).last_lines, (Lines{"98", "99", "100"}));
}

// What an uncaught c10::Error says stands above its stack
TEST(Job, KeepsNoStackFramesAmongTheLastLines) {
  auto options = job_of({"echo 'what(): no memory'; for i in $(seq 30); do echo \"frame #$i: f()\"; done; echo"});
  options.keep_last_lines = 3;
  const auto result = Job(std::move(options)).run();
  EXPECT_EQ(result.at(0).last_lines, (Lines{"what(): no memory", ""}));
}

TEST(Job, CollectsReportsOfAnySize) {
  auto options = job_of({"echo first >&$LOCKSTEP_REPORT_FD", "head -c 1000000 /dev/zero >&$LOCKSTEP_REPORT_FD"});
  options.collect_reports = true;
  const auto result = Job(std::move(options)).run();
  EXPECT_EQ(result.at(0).report, "first\n");
  EXPECT_EQ(result.at(1).report.size(), 1'000'000U);
}

TEST(Job, DoesNotPassOnTheReportOfAJobAroundIt) {
  ::setenv(kReportFdVariable, "9", 1);
  const auto result = Job(job_of({"echo ${LOCKSTEP_REPORT_FD-none}"})).run();
  ::unsetenv(kReportFdVariable);
  EXPECT_EQ(result.at(0).last_lines, Lines{"none"});
}

TEST(Job, NamesTheRankThatFailedFirstAndStopsTheOthers) {
  const auto result = Job(job_of({"sleep 1000", "exit 3", "trap 'exit 9' TERM; sleep 1000 & wait"})).run();
  EXPECT_EQ(result.first_failed, 1);
  EXPECT_EQ(result.at(1).status.code, 3);
  EXPECT_FALSE(result.at(1).stopped_by_us);
  EXPECT_EQ(result.at(0).status.signal, SIGTERM);
  EXPECT_TRUE(result.at(0).stopped_by_us);
  EXPECT_TRUE(result.at(2).stopped_by_us);
  EXPECT_FALSE(result.ok());
}

TEST(Job, OrdersFailuresByTimeNotByRank) {
  const TemporaryDirectory directory;
  // Rank 0 fails because rank 1 is gone, as a broken connection would make it.
  auto options = job_of(
      {"while [ ! -e " + (directory / "pid") + " ]; do sleep 0.01; done; pid=$(cat " + (directory / "pid") +
           "); while kill -0 $pid 2>/dev/null; do sleep 0.05; done; exit 1",
       "echo $$ > " + (directory / "tmp") + "; mv " + (directory / "tmp") + " " + (directory / "pid") + "; exit 2"});
  options.stop_others_on_failure = false;
  const auto result = Job(std::move(options)).run();
  EXPECT_EQ(result.first_failed, 1);
  EXPECT_EQ(result.at(0).status.code, 1);
  EXPECT_EQ(result.at(1).status.code, 2);
}

TEST(Job, LetsSurvivorsSayWhatTheySeeBeforeItStopsThem) {
  auto options = job_of({"sleep 0.2; echo rank 1 is gone; exit 7", "exit 3", "sleep 1000"});
  options.linger_after_failure = milliseconds(1000);
  const auto result = Job(std::move(options)).run();
  EXPECT_EQ(result.first_failed, 1);
  EXPECT_EQ(result.at(0).last_lines, Lines{"rank 1 is gone"});
  EXPECT_EQ(result.at(0).status.code, 7);
  EXPECT_FALSE(result.at(0).stopped_by_us);
  EXPECT_TRUE(result.at(2).stopped_by_us);
}

// the rank that failed unwinds for longer than those it takes along
TEST(Job, NamesARankThatBlamesNobodyBeforeOnesThatDo) {
  auto options = job_of({"echo '[lockstep/comm] rank 0: rank 1 left by an exception'; exit 1",
                         "sleep 0.3; echo 'what(): no such file'; exit 3",
                         "sleep 0.1; echo '[lockstep/shm] rank 2: rank 1 is gone: its process ended'; exit 1"});
  options.linger_after_failure = testing_internal::kPatience;
  EXPECT_EQ(Job(std::move(options)).run().first_failed, 1);
}

TEST(Job, NamesTheEarliestIfAllBlameEachOther) {
  auto options =
      job_of({"sleep 0.3; echo rank 1 is gone, hung or late; exit 1", "echo rank 0 is gone, hung or late; exit 1"});
  options.linger_after_failure = testing_internal::kPatience;
  EXPECT_EQ(Job(std::move(options)).run().first_failed, 1);
}

//
TEST(Job, TellsOfEveryRankThatEndsOnce) {
  auto options = job_of({"sleep 0.3", "exit 3", "kill -9 $$"});
  options.stop_others_on_failure = false;
  std::map<int, Lines> ends;
  options.on_end = [&](int rank, const ExitStatus& status) { ends[rank].push_back(status.describe()); };
  Job(std::move(options)).run();
  EXPECT_EQ(ends,
            (std::map<int, Lines>{{0, {"exit code 0"}}, {1, {"exit code 3"}}, {2, {"killed by signal 9 (Killed)"}}}));
}

TEST(Job, StopsAtOnceAtTheTimeoutIfNobodyWasAsked) {
  auto options = job_of({"sleep 1000"});
  options.timeout = milliseconds(100);
  options.linger_after_timeout = std::chrono::hours(1);
  options.on_timeout = [](Job&, const std::vector<int>&) { return false; };
  EXPECT_TRUE(Job(std::move(options)).run().timed_out);
}

TEST(Job, DoesNotLingerOnceAllHaveEnded) {
  auto options = job_of({"exit 7", "exit 3"});
  options.linger_after_failure = std::chrono::seconds(100);
  EXPECT_FALSE(Job(std::move(options)).run().ok());
}

TEST(Job, LetsOthersFinishIfToldTo) {
  auto options = job_of({"sleep 0.3; echo done", "exit 1"});
  options.stop_others_on_failure = false;
  const auto result = Job(std::move(options)).run();
  EXPECT_TRUE(result.at(0).status.ok());
  EXPECT_EQ(result.at(0).last_lines, Lines{"done"});
  EXPECT_EQ(result.first_failed, 1);
}

TEST(Job, KillsWhoIgnoresTheRequestToStop) {
  const TemporaryDirectory directory;
  auto options = job_of({"trap '' TERM; touch " + (directory / "deaf") + "; while :; do sleep 0.05; done",
                         "while [ ! -e " + (directory / "deaf") + " ]; do sleep 0.01; done; exit 1"});
  options.grace = milliseconds(200);
  const auto result = Job(std::move(options)).run();
  EXPECT_EQ(result.at(0).status.signal, SIGKILL);
  EXPECT_EQ(result.first_failed, 1);
}

TEST(Job, NamesTheRanksAliveAtTheTimeout) {
  auto options = job_of({"sleep 1000", "exit 0"});
  options.timeout = milliseconds(3000);
  const auto result = Job(std::move(options)).run();
  EXPECT_TRUE(result.timed_out);
  EXPECT_EQ(result.alive_at_timeout, std::vector<int>{0});
  EXPECT_EQ(result.first_failed, std::nullopt);
  EXPECT_TRUE(result.at(0).stopped_by_us);
  EXPECT_FALSE(result.at(1).stopped_by_us);
}

TEST(Job, LetsTheCallerAskForLastWordsAtTheTimeout) {
  auto options = job_of({"trap 'echo stack of $RANK; exit 0' USR2; echo ready; while :; do sleep 0.05; done"});
  options.timeout = milliseconds(3000);
  options.linger_after_timeout = testing_internal::kPatience;
  options.on_timeout = [](Job& job, const std::vector<int>& alive) {
    for (const int rank : alive) EXPECT_TRUE(job.signal_rank(rank, SIGUSR2));
    return true;
  };
  const auto result = Job(std::move(options)).run();
  EXPECT_TRUE(result.timed_out);
  EXPECT_EQ(result.at(0).last_lines, (Lines{"ready", "stack of 0"}));
}

TEST(Job, DoesNotTakeADeathByTheCallersSignalForAFailure) {
  auto options = job_of({"sleep 1000"});
  options.timeout = milliseconds(100);
  options.linger_after_timeout = milliseconds(30'000);
  options.on_timeout = [](Job& job, const std::vector<int>&) { return job.signal_rank(0, SIGUSR2); };
  const auto result = Job(std::move(options)).run();
  EXPECT_EQ(result.first_failed, std::nullopt);
  EXPECT_EQ(result.at(0).status.signal, SIGUSR2);
}

TEST(Job, ForwardsAnInterruptAndWaits) {
  auto options = job_of({"trap 'echo saved; exit 0' INT; echo ready; while :; do sleep 0.02; done"});
  Job* target = nullptr;
  options.on_line = [&](int, OutputStream, std::string_view line) {
    if (line == "ready") target->interrupt(SIGINT);
  };
  options.grace = testing_internal::kPatience;
  Job job(std::move(options));
  target = &job;
  const auto result = job.run();
  EXPECT_EQ(result.interrupted_by, SIGINT);
  EXPECT_EQ(result.at(0).last_lines, (Lines{"ready", "saved"}));
  EXPECT_EQ(result.first_failed, std::nullopt);
  EXPECT_FALSE(result.ok());
}

TEST(Job, KillsAtTheSecondInterrupt) {
  auto options = job_of({"trap '' INT TERM; echo ready; while :; do sleep 0.02; done"});
  options.grace = std::chrono::hours(1);
  Job* target = nullptr;
  options.on_line = [&](int, OutputStream, std::string_view) {
    target->interrupt(SIGINT);
    target->interrupt(SIGINT);
  };
  Job job(std::move(options));
  target = &job;
  EXPECT_EQ(job.run().at(0).status.signal, SIGKILL);
}

TEST(Job, StartsNothingIfInterruptedBefore) {
  Job job(job_of({"echo no", "echo no"}));
  job.interrupt(SIGTERM);
  const auto result = job.run();
  EXPECT_FALSE(result.at(0).started);
  EXPECT_FALSE(result.at(1).started);
  EXPECT_EQ(result.interrupted_by, SIGTERM);
}

TEST(Job, StopsTheStartedRanksIfOneCannotBeStarted) {
  const Mark mark;
  auto options = job_of({"sleep 1000", ""});
  options.ranks[0].environment[mark.name()] = "1";
  options.ranks[1].argv = {"/no/such/program"};
  Job job(std::move(options));
  EXPECT_THROW(job.run(), std::system_error);
  EXPECT_TRUE(mark.processes().empty());
}

TEST(Job, StopsTheRanksIfACallbackThrows) {
  const Mark mark;
  auto options = job_of({"echo x; sleep 1000", "sleep 1000"});
  for (auto& spec : options.ranks) spec.environment[mark.name()] = "1";
  options.on_line = [](int, OutputStream, std::string_view) { throw std::runtime_error("no more lines"); };
  Job job(std::move(options));
  EXPECT_THROW(job.run(), std::runtime_error);
  EXPECT_TRUE(mark.processes().empty());
}

TEST(Job, RunsBesideOtherJobsInThreads) {
  std::vector<std::thread> threads;
  std::vector<int> codes(4, -1);
  for (std::size_t i = 0; i < codes.size(); ++i) {
    threads.emplace_back([&codes, i] {
      const auto result = Job(job_of({"exit 0", str("seq 1 1000; exit ", i + 1)})).run();
      codes[i] = result.at(1).status.code.value_or(-1);
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(codes, (std::vector<int>{1, 2, 3, 4}));
}

TEST(Job, RefusesNonsense) {
  EXPECT_THROW(Job(JobOptions{}), std::invalid_argument);
  auto twice = job_of({"", ""});
  twice.ranks[1].rank = 0;
  EXPECT_THROW(Job(std::move(twice)), std::invalid_argument);
  auto empty = job_of({""});
  empty.ranks[0].argv.clear();
  EXPECT_THROW(Job(std::move(empty)), std::invalid_argument);
}

}  // namespace
}  // namespace lockstep
