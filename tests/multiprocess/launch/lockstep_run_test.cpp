#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <sstream>

#include "lockstep/base/str.h"
#include "tests/multiprocess/launch/processes.h"
#include "tests/unit/launch/time_limit.h"

namespace lockstep {
namespace {

using testing_internal::count_lines;
using testing_internal::eventually;
using testing_internal::lockstep_run;
using testing_internal::Mark;
using testing_internal::Outcome;
using testing_internal::Program;
using testing_internal::read_file;
using testing_internal::run_to_end;
using testing_internal::TemporaryDirectory;

Outcome run_script(std::vector<std::string> options, const std::string& script,
                   const std::map<std::string, std::string>& environment = {}) {
  options.insert(options.end(), {"/bin/sh", "-c", script});
  return run_to_end(options, environment);
}

// Output lines in an order that does not depend on which rank was faster.
std::vector<std::string> sorted_lines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  std::sort(lines.begin(), lines.end());
  return lines;
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(LockstepRun, PrefixesLinesWithTheirRankAndKeepsTheirOrder) {
  const auto outcome = run_script({"-n", "3"}, "echo one; echo two; echo err >&2");
  EXPECT_EQ(outcome.code, 0);
  EXPECT_EQ(sorted_lines(outcome.out),
            (std::vector<std::string>{"[0] one", "[0] two", "[1] one", "[1] two", "[2] one", "[2] two"}));
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_LT(outcome.out.find(str("[", rank, "] one")), outcome.out.find(str("[", rank, "] two")));
    EXPECT_TRUE(contains(outcome.err, str("[", rank, "] err\n")));
  }
}

TEST(LockstepRun, LeavesThePrefixOutIfToldTo) {
  EXPECT_EQ(run_script({"--no-prefix"}, "echo bare").out, "bare\n");
}

TEST(LockstepRun, KeepsALastLineWithoutNewline) {
  EXPECT_EQ(run_script({}, "printf unfinished").out, "[0] unfinished\n");
}

TEST(LockstepRun, PassesArgumentsThrough) {
  EXPECT_EQ(run_to_end({"-n", "1", "printf", "%s;", "-n", "--", "--help", "a b", ""}).out, "[0] -n;--;--help;a b;;\n");
}

TEST(LockstepRun, GivesRanksTheirEnvironment) {
  const auto outcome = run_script({"-n", "2", "--nnodes", "2", "--node-rank", "1", "--master", "head:123"},
                                  "echo $RANK $WORLD_SIZE $LOCAL_RANK $GROUP_RANK $MASTER_ADDR $MASTER_PORT "
                                  "${TORCHELASTIC_USE_AGENT_STORE-none} ${SLURM_PROCID-none}",
                                  {{"TORCHELASTIC_USE_AGENT_STORE", "True"}, {"SLURM_PROCID", "7"}, {"RANK", "99"}});
  EXPECT_EQ(sorted_lines(outcome.out),
            (std::vector<std::string>{"[2] 2 4 0 1 head 123 none none", "[3] 3 4 1 1 head 123 none none"}));
}

TEST(LockstepRun, ChoosesOmpThreadsAndSaysSoOnceUnlessTheUserDid) {
  const char* script = "echo ${OMP_NUM_THREADS-none}";
  const auto chosen = run_script({"-n", "2"}, script, {{"OMP_NUM_THREADS", "7"}});
  EXPECT_EQ(sorted_lines(chosen.out), (std::vector<std::string>{"[0] 7", "[1] 7"}));
  EXPECT_EQ(chosen.err, "");
  const auto shared = run_script({"-n", "2"}, script, {{"OMP_NUM_THREADS", ""}});
  EXPECT_FALSE(contains(shared.out, "none"));
  EXPECT_EQ(count_lines(shared.err), 1) << shared.err;
}

TEST(LockstepRun, ReturnsTheCodeOfTheRankThatFailedFirst) {
  const auto outcome = run_script({"-n", "3"}, "[ $RANK = 1 ] && { echo bad loss; exit 3; }; sleep 1000");
  EXPECT_EQ(outcome.code, 3);
  EXPECT_TRUE(contains(outcome.err, "rank 1 failed first: exit code 3")) << outcome.err;
  EXPECT_TRUE(contains(outcome.err, "  | bad loss\n")) << outcome.err;
  EXPECT_TRUE(contains(outcome.err, "stopped ranks 0, 2\n")) << outcome.err;
}

TEST(LockstepRun, ShowsWhatSurvivorsSayOfTheRankThatDied) {
  const auto outcome = run_script({"-n", "2"}, "[ $RANK = 1 ] && exit 3; sleep 0.5; echo rank 1 is gone; exit 1");
  EXPECT_EQ(outcome.code, 3);
  EXPECT_TRUE(contains(outcome.out, "[0] rank 1 is gone")) << outcome.out;
  EXPECT_TRUE(contains(outcome.err, "rank 1 failed first: exit code 3")) << outcome.err;
  EXPECT_TRUE(contains(outcome.err, "rank 0 failed too: exit code 1")) << outcome.err;
}

TEST(LockstepRun, ReportsDeathBySignal) {
  const auto outcome = run_script({"-n", "2"}, "[ $RANK = 1 ] && kill -SEGV $$; sleep 1000");
  EXPECT_EQ(outcome.code, 128 + SIGSEGV);
  EXPECT_TRUE(contains(outcome.err, "rank 1 failed first: killed by signal 11 (Segmentation fault)")) << outcome.err;
}

TEST(LockstepRun, ShowsOnlyTheLastLinesOfAFailure) {
  const auto outcome = run_script({}, "seq 1 50 >&2; exit 1");
  EXPECT_TRUE(contains(outcome.err, "  | 50\n"));
  EXPECT_TRUE(contains(outcome.err, "  | 41\n"));
  EXPECT_FALSE(contains(outcome.err, "  | 40\n"));
}

TEST(LockstepRun, RefusesBadArgumentsWithCodeTwoAndUsage) {
  for (const auto& arguments : std::vector<std::vector<std::string>>{
           {}, {"-n", "0", "true"}, {"--bogus", "true"}, {"--nnodes", "2", "true"}, {"--timeout", "x", "true"}}) {
    const auto outcome = run_to_end(arguments);
    EXPECT_EQ(outcome.code, 2);
    EXPECT_TRUE(contains(outcome.err, "Usage: lockstep-run")) << outcome.err;
    EXPECT_EQ(outcome.out, "");
  }
}

TEST(LockstepRun, SaysLikeAShellThatAProgramCannotRun) {
  const auto missing = run_to_end({"-n", "2", "/no/such/program"});
  EXPECT_EQ(missing.code, 127);
  EXPECT_TRUE(contains(missing.err, "cannot start '/no/such/program': No such file or directory")) << missing.err;
  const auto forbidden = run_to_end({"/etc/passwd"});
  EXPECT_EQ(forbidden.code, 126);
  EXPECT_TRUE(contains(forbidden.err, "Permission denied")) << forbidden.err;
}

TEST(LockstepRun, StopsAtTheTimeout) {
  const Mark mark;
  const auto outcome = run_script({"-n", "2", "--timeout", "500ms"}, "sleep 1000", {{mark.name(), ""}});
  EXPECT_EQ(outcome.code, 124);
  EXPECT_TRUE(contains(outcome.err, "time is over; ranks 0, 1 still ran")) << outcome.err;
  EXPECT_TRUE(mark.processes().empty());
}

// U-9: a shell that does not know the request would die of it
TEST(LockstepRun, AsksOnlyRanksThatCatchTheSignalForTheirStacks) {
  const auto outcome =
      run_script({"-n", "2", "--timeout", "1s"},
                 "if [ $RANK = 0 ]; then trap 'echo asked' USR2; else trap 'echo stopped; exit 0' TERM; fi; "
                 "while :; do sleep 0.05; done");
  EXPECT_EQ(outcome.code, 124);
  EXPECT_TRUE(contains(outcome.out, "[0] asked")) << outcome.out;
  EXPECT_TRUE(contains(outcome.out, "[1] stopped")) << outcome.out;
}

// (U-9)
TEST(LockstepRun, MakesPythonFlushUnlessTheUserChose) {
  EXPECT_EQ(run_script({}, "echo $PYTHONUNBUFFERED").out, "[0] 1\n");
  EXPECT_EQ(run_script({}, "echo $PYTHONUNBUFFERED", {{"PYTHONUNBUFFERED", "x"}}).out, "[0] x\n");
}

//
TEST(LockstepRun, TellsRanksWhichOfThemHaveEnded) {
  const auto outcome = run_script({"-n", "2"},
                                  "[ $RANK = 1 ] && exit 0; while [ ! -e $LOCKSTEP_ENDED_DIR/1 ]; do sleep 0.01; done; "
                                  "cat $LOCKSTEP_ENDED_DIR/1; echo; echo $LOCKSTEP_ENDED_DIR");
  EXPECT_EQ(outcome.code, 0);
  const auto lines = sorted_lines(outcome.out);
  ASSERT_EQ(lines.size(), 2U) << outcome.out;
  EXPECT_EQ(lines[1], "[0] exit code 0");
  struct stat folder {};
  EXPECT_NE(::stat(lines[0].substr(4).c_str(), &folder), 0) << lines[0];
}

// Longer than others are waited for after a failure.
constexpr const char* kGoOn =
    "while [ ! -e $LOCKSTEP_ENDED_DIR/1 ]; do sleep 0.01; done; sleep 2; echo went on; touch $LOCKSTEP_STORE_FILE";

TEST(LockstepRun, LetsSurvivorsGoOnAndEndsWellIfOneDoes) {
  for (const std::string death : {"exit 3", "kill -KILL $$"}) {
    const TemporaryDirectory directory;
    const auto outcome =
        run_script({"-n", "3", "--survivors"},
                   "[ $RANK = 1 ] && " + death + "; " + kGoOn + "; [ $RANK = 0 ] && exit 5; echo $LOCKSTEP_STORE_FILE",
                   {{"TMPDIR", directory.path()}});
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    const auto lines = sorted_lines(outcome.out);
    ASSERT_EQ(lines.size(), 3U) << outcome.out;
    EXPECT_TRUE(contains(lines[1], "[2] " + directory.path() + "/")) << "the store is one for all: " << lines[1];
    EXPECT_EQ(lines[0], "[0] went on");
    EXPECT_EQ(lines[2], "[2] went on");
    EXPECT_TRUE(contains(outcome.err, "rank 1 failed first: ")) << outcome.err;
    EXPECT_TRUE(contains(outcome.err, "rank 0 failed too: exit code 5")) << outcome.err;
    EXPECT_FALSE(contains(outcome.err, "stopped rank")) << outcome.err;
    EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
  }
}

TEST(LockstepRun, FailsIfNobodySurvives) {
  const TemporaryDirectory directory;
  const auto outcome =
      run_script({"-n", "3", "--survivors"}, std::string("[ $RANK = 1 ] && exit 3; ") + kGoOn + "; exit 5",
                 {{"TMPDIR", directory.path()}});
  EXPECT_EQ(outcome.code, 3) << outcome.err;
  EXPECT_EQ(count_lines(outcome.out), 2) << outcome.out;
  EXPECT_TRUE(contains(outcome.err, "rank 2 failed too: exit code 5")) << outcome.err;
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
}

TEST(LockstepRun, RestartsOnlyIfNobodySurvives) {
  const auto outcome = run_script({"-n", "2", "--survivors", "--max-restarts", "3"},
                                  "echo try $LOCKSTEP_RESTART_COUNT; [ $RANK = 0 ] || exit 3; "
                                  "[ $LOCKSTEP_RESTART_COUNT = 1 ] || exit 4");
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(sorted_lines(outcome.out), (std::vector<std::string>{"[0] try 0", "[0] try 1", "[1] try 0", "[1] try 1"}));
}

TEST(LockstepRun, StopsSurvivorsAtTheTimeoutAndWhenInterrupted) {
  const TemporaryDirectory directory;
  const auto late = run_script({"-n", "2", "--survivors", "--timeout", "1s"}, "[ $RANK = 0 ] && exit 0; sleep 1000",
                               {{"TMPDIR", directory.path()}});
  EXPECT_EQ(late.code, 124) << late.err;
  Program program(
      lockstep_run({"-n", "2", "--survivors", "/bin/sh", "-c",
                    "echo ready; [ $RANK = 0 ] && exit 0; trap 'exit 0' INT; while :; do sleep 0.02; done"}),
      {{"TMPDIR", directory.path()}});
  ASSERT_TRUE(eventually([&] { return count_lines(program.out()) == 2; }));
  program.signal(SIGINT);
  EXPECT_EQ(program.wait().code, 130);
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
}

TEST(LockstepRun, SaysThatThereIsNoPlaceForTheStoreOfSurvivors) {
  const auto outcome = run_to_end({"--survivors", "true"}, {{"TMPDIR", "/no/such/folder"}});
  EXPECT_NE(outcome.code, 0);
  EXPECT_TRUE(contains(outcome.err, "no folder for --survivors")) << outcome.err;
}

TEST(LockstepRun, KillsAStubbornRankAfterTheGrace) {
  const TemporaryDirectory directory;
  const std::string deaf = directory / "deaf";
  const auto outcome =
      run_script({"-n", "2", "--grace", "300ms"}, "if [ $RANK = 0 ]; then trap '' TERM; touch " + deaf +
                                                      "; while :; do sleep 0.05; done; fi; while [ ! -e " + deaf +
                                                      " ]; do sleep 0.01; done; exit 4");
  EXPECT_EQ(outcome.code, 4);
}

TEST(LockstepRun, TakesGrandchildrenAlongAlsoFromOtherSessions) {
  const Mark mark;
  const auto outcome = run_script(
      {"-n", "2"}, "setsid sleep 1000 & (sleep 1000 &); [ $RANK = 0 ] && exit 6; sleep 1000", {{mark.name(), ""}});
  EXPECT_EQ(outcome.code, 6);
  EXPECT_TRUE(mark.processes().empty());
}

TEST(LockstepRun, LeavesNoProcessWhenKilled) {
  const Mark mark;
  Program program(lockstep_run({"-n", "2", "/bin/sh", "-c",
                                "trap '' TERM HUP INT; setsid sleep 1000 & (sleep 1000 &) ; sleep 1000"}),
                  {{mark.name(), ""}});
  // Itself, and per rank: guardian, shell and three sleeps.
  ASSERT_TRUE(eventually([&] { return mark.processes().size() == 11; })) << mark.processes().size();
  program.signal(SIGKILL);
  EXPECT_EQ(program.wait().code, 128 + SIGKILL);
  EXPECT_TRUE(eventually([&] { return mark.processes().empty(); })) << mark.processes().size();
}

TEST(LockstepRun, ForwardsAnInterruptAndReturnsItsCode) {
  Program program(lockstep_run({"-n", "2", "--grace", "60s", "/bin/sh", "-c",
                                "trap 'echo saved; exit 0' INT; echo ready; while :; do sleep 0.02; done"}));
  ASSERT_TRUE(eventually([&] { return count_lines(program.out()) == 2; }));
  program.signal(SIGINT);
  const auto outcome = program.wait();
  EXPECT_EQ(outcome.code, 130);
  EXPECT_TRUE(contains(outcome.out, "[0] saved\n"));
  EXPECT_TRUE(contains(outcome.out, "[1] saved\n"));
}

TEST(LockstepRun, KillsAtTheSecondSignal) {
  const Mark mark;
  Program program(lockstep_run({"-n", "2", "--grace", "1h", "/bin/sh", "-c",
                                "trap 'echo heard' TERM; echo ready; while :; do sleep 0.02; done"}),
                  {{mark.name(), ""}});
  ASSERT_TRUE(eventually([&] { return count_lines(program.out()) == 2; }));
  program.signal(SIGTERM);
  ASSERT_TRUE(eventually([&] { return count_lines(program.out()) == 4; }));
  program.signal(SIGTERM);
  EXPECT_EQ(program.wait().code, 143);
  EXPECT_TRUE(mark.processes().empty());
}

TEST(LockstepRun, RestartsAllRanksWithANewCount) {
  const auto outcome = run_script({"-n", "2", "--max-restarts", "3"},
                                  "echo try $TORCHELASTIC_RESTART_COUNT $LOCKSTEP_RESTART_COUNT of "
                                  "$TORCHELASTIC_MAX_RESTARTS $TORCHELASTIC_RUN_ID; "
                                  "[ $TORCHELASTIC_RESTART_COUNT = 2 ] || sleep 0.2; "
                                  "[ $TORCHELASTIC_RESTART_COUNT = 2 ] || [ $RANK = 0 ] || exit 1");
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_TRUE(contains(outcome.out, "[1] try 0 0 of 3"));
  EXPECT_TRUE(contains(outcome.out, "[1] try 1 1 of 3"));
  EXPECT_TRUE(contains(outcome.out, "[0] try 2 2 of 3"));
  EXPECT_TRUE(contains(outcome.err, "restarting all ranks (2 of 3)")) << outcome.err;
  EXPECT_FALSE(contains(outcome.err, "restarting all ranks (3 of 3)")) << outcome.err;
}

TEST(LockstepRun, GivesUpAfterTheLastRestart) {
  const auto outcome = run_script({"--max-restarts", "2"}, "echo again; exit 5");
  EXPECT_EQ(outcome.code, 5);
  EXPECT_EQ(count_lines(outcome.out), 3);
}

TEST(LockstepRun, WritesLogsPerAttemptRankAndStream) {
  const TemporaryDirectory directory;
  const auto outcome =
      run_script({"-n", "2", "--max-restarts", "1", "--log-dir", directory / "logs"},
                 "echo out $RANK; echo err $RANK >&2; printf tail; exit $((1 - LOCKSTEP_RESTART_COUNT))");
  EXPECT_EQ(outcome.code, 0);
  for (const std::string rank : {"0", "1"}) {
    const std::string log = (directory / "logs/attempt_1/rank_") + rank;
    EXPECT_EQ(read_file(log + ".out"), "out " + rank + "\ntail\n");
    EXPECT_EQ(read_file(log + ".err"), "err " + rank + "\n");
  }
  struct stat file {};
  EXPECT_EQ(::stat((directory / "logs/attempt_0/rank_1.out").c_str(), &file), 0);
}

TEST(LockstepRun, SaysThatLogsCannotBeWritten) {
  const auto outcome = run_to_end({"--log-dir", "/dev/null/logs", "true"});
  EXPECT_EQ(outcome.code, 1);
  EXPECT_TRUE(contains(outcome.err, "cannot create /dev/null/logs/attempt_0")) << outcome.err;
}

TEST(LockstepRun, CopesWithHugeOutputOnBothStreams) {
  const auto outcome = run_script({"-n", "2"}, "seq 1 200000 & seq 1 200000 >&2 & wait; head -c 3000000 /dev/zero");
  EXPECT_EQ(outcome.code, 0);
  // The zeros are one line of three times 1 MiB at most, cut in pieces.
  EXPECT_EQ(count_lines(outcome.out), 2 * (200'000 + 3));
  EXPECT_GE(count_lines(outcome.err), 2 * 200'000);
}

TEST(LockstepRun, GoesOnWhenNobodyReadsItsOutput) {
  const TemporaryDirectory directory;
  Program program({"/bin/sh", "-c",
                   str("{ ", LOCKSTEP_RUN_PATH, " sh -c 'seq 1 100000; echo done > ", directory / "trace",
                       "'; echo $? > ", directory / "code", "; } | head -n 1")});
  EXPECT_EQ(program.wait().out, "[0] 1\n");
  EXPECT_TRUE(eventually([&] { return read_file(directory / "code") == "0\n"; }));
  EXPECT_EQ(read_file(directory / "trace"), "done\n");
}

}  // namespace
}  // namespace lockstep
