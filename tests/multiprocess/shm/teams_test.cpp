// Two processes of two ranks each, as threads, in teams of every kind: across, inside, overlapping. One pool and one
// lifeline per process serve all. The processes are this program again, without libtorch.
#include <dirent.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <thread>

#include "lockstep/base/env.h"
#include "lockstep/base/str.h"
#include "lockstep/launch/child.h"
#include "lockstep/shm/collective.h"
#include "lockstep/shm/errors.h"
#include "lockstep/shm/pool.h"
#include "tests/support/agree_by_file.h"

namespace lockstep::shm {
namespace {

using namespace std::chrono_literals;

const std::vector<std::vector<int>> kTeams = {{0, 1, 2, 3}, {0, 2}, {1, 3}, {0, 1}, {2, 3}, {3, 1, 0}, {2, 0, 1, 3}};
constexpr std::size_t kFloats = 300'007;

void require(bool holds, const std::string& what) {
  if (holds) return;
  std::printf("not so: %s\n", what.c_str());
  std::fflush(stdout);
  std::_Exit(1);
}

int open_descriptors() {
  int count = 0;
  DIR* folder = ::opendir("/proc/self/fd");
  while (::readdir(folder) != nullptr) ++count;
  ::closedir(folder);
  return count;
}

std::uint32_t steps_of(Collectives& collectives, float* values) {
  const auto& ready = collectives.team().lane(collectives.team().rank()).ready.value;
  const auto before = ready.load();
  const Span span{reinterpret_cast<std::byte*>(values), kFloats * sizeof(float)};
  collectives.run({.kind = Kind::kAllReduce,
                   .element_bytes = sizeof(float),
                   .gives = {&span, 1},
                   .gets = {&span, 1},
                   .timeout = 30s},
                  Patience::of_caller(4));
  return ready.load() - before;
}

/// What rank `rank` of the world does.
void take_part(int rank, const std::string& folder) {
  std::vector<std::unique_ptr<Collectives>> all;
  std::byte* block = nullptr;
  int descriptors = 0;
  for (std::size_t i = 0; i < kTeams.size(); ++i) {
    const auto& ranks = kTeams[i];
    const auto found = std::find(ranks.begin(), ranks.end(), rank);
    if (found == ranks.end()) continue;
    const auto name = str("team-", i);
    const int place = static_cast<int>(found - ranks.begin());
    const auto team = Team::of_processes(
        {.rank = place, .size = static_cast<int>(ranks.size()), .names = ranks, .group = name, .timeout = 30s},
        [&](const std::string& word) { return agree_by_file(str(folder, "/", name), place, word, 20s); });
    all.push_back(std::make_unique<Collectives>(team));
    // From the first team's memory, for all teams.
    if (i == 0) block = team->pool()->allocate(kFloats * sizeof(float));
    auto* const values = reinterpret_cast<float*>(block);
    std::vector<float> ordinary(kFloats, static_cast<float>(rank + 1));
    std::copy(ordinary.begin(), ordinary.end(), values);
    float sum = 0;
    for (const int each : ranks) sum += static_cast<float>(each + 1);
    require(steps_of(*all.back(), values) == 1, name + " reads shared memory in place");
    require(steps_of(*all.back(), ordinary.data()) > 1, name + " does not reach ordinary memory");
    for (const std::size_t at : {std::size_t{0}, kFloats / 2, kFloats - 1}) {
      require(values[at] == sum && ordinary[at] == sum, name + " sums");
    }
    // Nobody meets while somebody counts.
    const auto barrier = [&] { all.front()->run({.kind = Kind::kBarrier, .timeout = 30s}, Patience::of_caller(4)); };
    if (i == 0 || i + 1 == kTeams.size()) {
      barrier();
      // One rank of a process: to count is to open a descriptor.
      if (i == 0 && rank % 2 == 0) descriptors = open_descriptors();
      if (i > 0 && rank % 2 == 0) require(open_descriptors() == descriptors, "teams cost no descriptors");
      barrier();
    }
  }
}

/// The body of a process; not a test by itself.
TEST(Pair, DISABLED_OfRanks) {
  const int first = 2 * std::stoi(*env("LOCKSTEP_TEST_PROCESS"));
  const auto folder = *env("LOCKSTEP_TEST_FOLDER");
  const auto run = [&](int rank) {
    try {
      take_part(rank, folder);
    } catch (const std::exception& error) {
      require(false, error.what());
    }
  };
  std::thread second([&] { run(first + 1); });
  run(first);
  second.join();
}

TEST(Teams, OfThreadsAndProcessesShareOnePoolPerProcess) {
  std::string folder = "/tmp/lockstep-teams-XXXXXX";
  ASSERT_NE(::mkdtemp(folder.data()), nullptr);
  std::vector<Child> processes;
  for (int process = 0; process < 2; ++process) {
    processes.emplace_back(ChildOptions{
        .argv = {"/proc/self/exe", "--gtest_also_run_disabled_tests", "--gtest_filter=Pair.DISABLED_OfRanks",
                 "--gtest_brief=1"},
        .environment = {{"LOCKSTEP_TEST_PROCESS", std::to_string(process)}, {"LOCKSTEP_TEST_FOLDER", folder}},
        .inherited_fds = {}});
  }
  for (auto& process : processes) {
    const auto deadline = Child::Clock::now() + 60s;
    while (!process.exit_status() && Child::Clock::now() < deadline) process.wait_until_gone(10ms);
    std::string text(4096, '\0');
    const auto got = ::read(process.stdout_fd(), text.data(), text.size());
    text.resize(static_cast<std::size_t>(std::max<ssize_t>(got, 0)));
    ASSERT_TRUE(process.exit_status()) << "it hangs";
    EXPECT_EQ(process.exit_status()->code, 0) << text;
  }
  for (std::size_t i = 0; i < kTeams.size(); ++i) ::unlink(str(folder, "/team-", i).c_str());
  ::rmdir(folder.c_str());
}

}  // namespace
}  // namespace lockstep::shm
