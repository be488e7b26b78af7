#include "cli/summary.h"

#include <csignal>

#include "tests/unit/launch/time_limit.h"

namespace lockstep::cli {
namespace {

RankResult ended(int rank, ExitStatus status, bool stopped_by_us = false) {
  return {.rank = rank,
          .started = true,
          .status = status,
          .last_lines = {},
          .report = {},
          .duration = std::chrono::milliseconds(1500),
          .stopped_by_us = stopped_by_us};
}

constexpr ExitStatus code(int value) {
  return {.code = value, .signal = {}};
}
constexpr ExitStatus signaled(int value) {
  return {.code = {}, .signal = value};
}

TEST(Summary, SaysNothingIfAllWentWell) {
  JobResult result;
  result.ranks = {ended(0, code(0)), ended(1, code(0))};
  EXPECT_EQ(summary(result), "");
  EXPECT_EQ(exit_code(result), 0);
}

TEST(Summary, NamesTheFirstFailureItsLastLinesAndWhoWasStopped) {
  JobResult result;
  result.ranks = {ended(0, signaled(SIGTERM), true), ended(1, code(3)), ended(2, code(1)), ended(3, code(0), true)};
  result.ranks[1].last_lines = {"loss is", "nan"};
  result.first_failed = 1;
  EXPECT_EQ(summary(result),
            "lockstep-run: rank 1 failed first: exit code 3 after 1.5 s; its last lines:\n"
            "  | loss is\n"
            "  | nan\n"
            "lockstep-run: rank 2 failed too: exit code 1\n"
            "lockstep-run: stopped ranks 0, 3\n");
  EXPECT_EQ(exit_code(result), 3);
}

TEST(Summary, TurnsASignalIntoTheCodeOfAShell) {
  JobResult result;
  result.ranks = {ended(0, signaled(SIGSEGV))};
  result.first_failed = 0;
  EXPECT_EQ(exit_code(result), 139);
  EXPECT_NE(summary(result).find("killed by signal 11 (Segmentation fault)"), std::string::npos);
}

TEST(Summary, NamesTheRanksThatStillRanAtTheTimeout) {
  JobResult result;
  result.ranks = {ended(0, code(0)), ended(1, signaled(SIGKILL), true)};
  result.timed_out = true;
  result.alive_at_timeout = {1};
  EXPECT_EQ(exit_code(result), 124);
  EXPECT_NE(summary(result).find("time is over; rank 1 still ran"), std::string::npos);
}

TEST(Summary, ReportsAnInterruptAndRanksItKeptFromStarting) {
  JobResult result;
  result.ranks = {ended(0, signaled(SIGINT), true), {.rank = 1, .status = {}, .last_lines = {}, .report = {}}};
  result.interrupted_by = SIGINT;
  EXPECT_EQ(exit_code(result), 130);
  EXPECT_NE(summary(result).find("interrupted by signal 2"), std::string::npos);
  EXPECT_NE(summary(result).find("never started rank 1"), std::string::npos);
}

}  // namespace
}  // namespace lockstep::cli
