// One binary, every launcher: alone, lockstep-run, torchrun and mpirun; and two hosts, as network namespaces.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "lockstep/base/env.h"
#include "lockstep/base/str.h"
#include "lockstep/comm/world.h"
#include "lockstep/launch/port.h"
#include "lockstep/testing/skip.h"

namespace lockstep {

/// Outside of the unnamed namespace: its name shall be found in a stack.
[[gnu::noinline]] void hang_in_a_named_function() {
  while (true) ::pause();
}

namespace {

using ::testing::HasSubstr;

// What ranks of the tests below run: this program again, with one of these. Alone they are never run.
TEST(LauncherPrograms, DISABLED_PrintsAndIsKilled) {
  const auto world = init();
  std::printf("before\n");
  ::raise(SIGKILL);
}

TEST(LauncherPrograms, DISABLED_Hangs) {
  const auto world = init();
  hang_in_a_named_function();
}

TEST(LauncherPrograms, DISABLED_OnlyMeets) {
  const auto world = init();
}

std::string program(const std::string& name) {
  std::string path(4096, '\0');
  path.resize(static_cast<std::size_t>(::readlink("/proc/self/exe", path.data(), path.size())));
  return str(path, " --gtest_also_run_disabled_tests --gtest_filter=LauncherPrograms.DISABLED_", name);
}

struct Output {
  int code = -1;
  std::string text;
};

/// Runs a shell command with a limit of its own, so that a hang fails this test and not the whole program.
Output run(const std::string& command) {
  Output result;
  FILE* pipe = ::popen(str("timeout 120 ", command, " 2>&1").c_str(), "r");
  if (pipe == nullptr) return result;
  std::array<char, 4096> buffer{};
  while (const auto count = std::fread(buffer.data(), 1, buffer.size(), pipe)) result.text.append(buffer.data(), count);
  const int status = ::pclose(pipe);
  result.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return result;
}

std::string example() {
  return env("LOCKSTEP_EXAMPLES").value_or("build/examples") + "/all_reduce 1 3";
}

bool has_command(const std::string& name) {
  return run("sh -c 'command -v " + name + "'").code == 0;
}

void expect_sum(const Output& output, int ranks, const std::string& launcher) {
  EXPECT_EQ(output.code, 0) << output.text;
  EXPECT_THAT(output.text, HasSubstr(str("on ", ranks, " ranks started by ", launcher))) << output.text;
  EXPECT_THAT(output.text, HasSubstr("sum correct"));
}

TEST(Launchers, NoneMeansAlone) {
  expect_sum(run(example()), 1, "none");
}

TEST(Launchers, LockstepRunStartsTheProgram) {
  const auto output = run(str(LOCKSTEP_RUN_PATH, " -n 3 ", example()));
  expect_sum(output, 3, "lockstep-run");
  if (lockstep::testing::device_count() == 0) {
    EXPECT_THAT(output.text, HasSubstr("backend shm"));  // tensors on a GPU go another way
  }
}

// (U-9)
TEST(Launchers, LockstepRunShowsWhatARankWroteBeforeItWasKilled) {
  const auto output = run(str(LOCKSTEP_RUN_PATH, " -n 1 ", program("PrintsAndIsKilled")));
  EXPECT_EQ(output.code, 128 + SIGKILL);
  EXPECT_THAT(output.text, HasSubstr("[0] before\n"));
}

// (U-9)
TEST(Launchers, LockstepRunShowsWhereRanksAreWhenTheTimeIsOver) {
  const auto output = run(str(LOCKSTEP_RUN_PATH, " -n 2 --timeout 5s ", program("Hangs")));
  EXPECT_EQ(output.code, 124);
  EXPECT_THAT(output.text, HasSubstr("lockstep::hang_in_a_named_function()"));
  EXPECT_THAT(output.text, HasSubstr("[1] main thread"));
  EXPECT_THAT(output.text, HasSubstr("time is over; ranks 0, 1 still ran"));
}

/// Of two ranks one ends before init().
void expect_that_others_name(int ended) {
  const auto start = std::chrono::steady_clock::now();
  const auto output =
      run(str(LOCKSTEP_RUN_PATH, " -n 2 sh -c '[ $RANK = ", ended, " ] && exit 0; exec ", program("OnlyMeets"), "'"));
  EXPECT_NE(output.code, 0);
  EXPECT_THAT(output.text, HasSubstr(str("rank ", ended, " ended (exit code 0) before it came")));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
}

// not after the timeout of half an hour
TEST(Launchers, RanksOfLockstepRunNoticeOneThatEndsBeforeItComes) {
  expect_that_others_name(1);
}

// the one that would serve the store
TEST(Launchers, RanksOfLockstepRunNoticeThatRankZeroEndsBeforeItComes) {
  expect_that_others_name(0);
}

// under other launchers, which do not tell who ended
TEST(Launchers, RanksWarnOfOnesThatDoNotComeForLong) {
  const PortReservation port;
  const auto output =
      run(str("env RANK=0 WORLD_SIZE=3 LOCAL_RANK=0 LOCAL_WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 MASTER_PORT=", port.port(),
              " timeout 15 ", program("OnlyMeets")));
  EXPECT_THAT(output.text, HasSubstr("rank 0: making group 'world' waits for rank 1, 2 since 10 s"));
}

TEST(Launchers, TorchrunStartsTheSameProgram) {
  const auto python = env("LOCKSTEP_PYTHON");
  if (!python || run(*python + " -c 'import torch'").code != 0) GTEST_SKIP() << "needs a Python with torch";
  expect_sum(run(*python + " -m torch.distributed.run --standalone --no-python --nproc-per-node 2 " + example()), 2,
             "torchrun");
}

TEST(Launchers, MpirunStartsTheSameProgram) {
  if (!has_command("mpirun")) GTEST_SKIP() << "needs Open MPI's mpirun";
  const std::string as_root = ::getuid() == 0 ? "--allow-run-as-root " : "";
  expect_sum(run("mpirun --oversubscribe " + as_root + "-n 3 " + example()), 3, "mpirun");
}

TEST(Launchers, BadEnvironmentIsAnErrorThatNamesTheVariable) {
  const auto output = run("env RANK=1 " + example());
  EXPECT_EQ(output.code, 1);
  EXPECT_THAT(output.text, HasSubstr("RANK is set, but WORLD_SIZE is not"));
}

/// Two namespaces joined by a cable, as two hosts; gone with the object.
class TwoHosts {
 public:
  TwoHosts() {
    const auto id = str("ls", ::getpid() % 10000);
    one_ = id + "a";
    two_ = id + "b";
    works_ = run(str("sh -ec 'ip netns add ", one_, "; ip netns add ", two_, "; ip link add ", one_, " netns ", one_,
                     " type veth peer name ", two_, " netns ", two_, "; ip -n ", one_, " addr add 10.77.0.1/24 dev ",
                     one_, "; ip -n ", two_, " addr add 10.77.0.2/24 dev ", two_, "; ip -n ", one_, " link set ", one_,
                     " up; ip -n ", two_, " link set ", two_, " up; ip -n ", one_, " link set lo up; ip -n ", two_,
                     " link set lo up'"))
                 .code == 0;
  }
  ~TwoHosts() {
    run("ip netns del " + one_);
    run("ip netns del " + two_);
  }
  TwoHosts(const TwoHosts&) = delete;
  TwoHosts& operator=(const TwoHosts&) = delete;

  bool works() const { return works_; }
  const std::string& one() const { return one_; }
  const std::string& two() const { return two_; }

 private:
  std::string one_;
  std::string two_;
  bool works_ = false;
};

TEST(Launchers, LockstepRunSpansTwoHosts) {
  if (::getuid() != 0) GTEST_SKIP() << "making network namespaces needs root";
  const TwoHosts hosts;
  if (!hosts.works()) GTEST_SKIP() << "this machine allows no network namespaces";
  const auto on = [&](const std::string& host, int node) {
    return str("ip netns exec ", host, " ", LOCKSTEP_RUN_PATH, " -n 2 --nnodes 2 --node-rank ", node,
               " --master 10.77.0.1:29511 ", example());
  };
  const auto output =
      run(str("sh -c '", on(hosts.two(), 1), " & ", on(hosts.one(), 0), "; code=$?; wait; exit $code'"));
  expect_sum(output, 4, "lockstep-run");
  EXPECT_THAT(output.text, HasSubstr("backend hierarchical"));
}

}  // namespace
}  // namespace lockstep
