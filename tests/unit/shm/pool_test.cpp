// The pool of a team of one: whoever shares the memory does not matter to whoever hands it out.
#include "lockstep/shm/pool.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <thread>

#include "lockstep/shm/errors.h"
#include "lockstep/shm/team.h"

namespace lockstep::shm {
namespace {

using ::testing::HasSubstr;

constexpr std::size_t kMiB = std::size_t{1} << 20;

/// A reserve of `bytes` for teams made while it lives.
class ReserveScope {
 public:
  explicit ReserveScope(std::size_t bytes) { ::setenv("LOCKSTEP_SHM_RESERVE_BYTES", std::to_string(bytes).c_str(), 1); }
  ~ReserveScope() { ::unsetenv("LOCKSTEP_SHM_RESERVE_BYTES"); }
  ReserveScope(const ReserveScope&) = delete;
  ReserveScope& operator=(const ReserveScope&) = delete;
};

std::shared_ptr<Team> team_of_one() {
  return Team::of_processes({.rank = 0, .size = 1}, [](const std::string& value) { return value; });
}

std::size_t existing_bytes(Team& team) {
  struct stat status = {};
  EXPECT_EQ(::fstat(team.pool()->memory().fd(), &status), 0);
  return static_cast<std::size_t>(status.st_blocks) * 512;
}

std::uintptr_t number_of(const std::byte* at) {
  return reinterpret_cast<std::uintptr_t>(at);
}

TEST(Pool, AlignsSmallBlocksToLinesAndLargeOnesToPages) {
  const auto team = team_of_one();
  auto& pool = *team->pool();
  for (const std::size_t bytes : {1, 7, 64, 65, 100, 4095, 1}) EXPECT_EQ(number_of(pool.allocate(bytes)) % 64, 0u);
  for (const std::size_t bytes : {4096, 4097, 1 << 20, 3'000'001, 5000}) {
    EXPECT_EQ(number_of(pool.allocate(bytes)) % 4096, 0u) << bytes;
  }
  EXPECT_EQ(number_of(pool.allocate(1)) % 64, 0u);
}

TEST(Pool, HandsOutMemoryThatTheTeamCanName) {
  const auto team = team_of_one();
  auto& pool = *team->pool();
  auto* const at = pool.allocate(1000);
  const auto location = team->locate(at, 1000);
  ASSERT_TRUE(location);
  EXPECT_EQ(team->resolve(0, *location), at);
  int local = 0;
  EXPECT_FALSE(team->locate(reinterpret_cast<const std::byte*>(&local), sizeof(local)));
}

TEST(Pool, CommitsOnlyWhatIsAskedFor) {
  const auto team = team_of_one();
  const auto before = existing_bytes(*team);
  auto& pool = *team->pool();
  EXPECT_EQ(pool.committed(), 0u);
  EXPECT_EQ(pool.used(), 0u);
  EXPECT_EQ(existing_bytes(*team), before);
  auto* const at = pool.allocate(10 * kMiB);
  EXPECT_EQ(pool.used(), 10 * kMiB);
  EXPECT_GE(pool.committed(), 10 * kMiB);
  EXPECT_LE(pool.committed(), 12 * kMiB);
  // Pages are there before anybody touches them.
  EXPECT_GE(existing_bytes(*team), before + 10 * kMiB);
  EXPECT_LE(existing_bytes(*team), before + 14 * kMiB);
  std::memset(at, 1, 10 * kMiB);
  pool.free(at);
  EXPECT_EQ(pool.used(), 0u);
}

TEST(Pool, DoesNotGrowWhenMemoryIsReused) {
  const auto team = team_of_one();
  auto& pool = *team->pool();
  auto* const first = pool.allocate(kMiB);
  const auto committed = pool.committed();
  pool.free(first);
  for (int i = 0; i < 1000; ++i) {
    auto* const again = pool.allocate(kMiB);
    EXPECT_EQ(again, first);
    pool.free(again);
  }
  EXPECT_EQ(pool.committed(), committed);
  EXPECT_EQ(pool.used(), 0u);
}

TEST(Pool, MergesWhatWasFreedWhateverTheOrder) {
  // Freed first to last, last to first, and the middle one last.
  for (const auto& order : {std::vector{0, 1, 2, 3}, {3, 2, 1, 0}, {0, 2, 3, 1}, {1, 3, 0, 2}}) {
    const auto team = team_of_one();
    auto& pool = *team->pool();
    std::byte* blocks[4];
    for (auto& block : blocks) block = pool.allocate(kMiB);
    auto* const guard = pool.allocate(64);
    const auto committed = pool.committed();
    for (const int i : order) pool.free(blocks[i]);
    EXPECT_EQ(pool.allocate(4 * kMiB), blocks[0]);
    EXPECT_EQ(pool.committed(), committed);
    pool.free(guard);
  }
}

TEST(Pool, GivesPagesBehindItsLastBlockBackWhenATeamEnds) {
  const auto team = team_of_one();
  auto& pool = *team->pool();
  auto* const kept = pool.allocate(100);
  auto* const freed = pool.allocate(20 * kMiB);
  std::memset(kept, 1, 100);
  std::memset(freed, 1, 20 * kMiB);
  pool.free(freed);
  EXPECT_GE(existing_bytes(*team), 20 * kMiB);
  team_of_one();
  EXPECT_LT(existing_bytes(*team), 2 * kMiB);
  EXPECT_EQ(pool.committed(), 4096U);
  EXPECT_EQ(kept[99], std::byte{1});
  auto* const again = pool.allocate(20 * kMiB);
  EXPECT_EQ(again, freed);
  EXPECT_GE(existing_bytes(*team), 20 * kMiB);
  EXPECT_EQ(again[0], std::byte{0});
  // What is in use stays, also behind a hole.
  std::memset(again, 1, 20 * kMiB);
  pool.free(kept);
  team_of_one();
  EXPECT_EQ(again[20 * kMiB - 1], std::byte{1});
}

TEST(Pool, FillsHolesBeforeItGrows) {
  const auto team = team_of_one();
  auto& pool = *team->pool();
  auto* const first = pool.allocate(2 * kMiB);
  pool.allocate(64);
  const auto committed = pool.committed();
  pool.free(first);
  EXPECT_EQ(pool.allocate(kMiB), first);
  EXPECT_EQ(pool.allocate(kMiB), first + kMiB);
  EXPECT_EQ(pool.committed(), committed);
}

TEST(Pool, SaysThatTheReserveIsExhausted) {
  const ReserveScope reserve(4 * kMiB);
  const auto team = team_of_one();
  auto& pool = *team->pool();
  auto* const most = pool.allocate(3 * kMiB);
  try {
    pool.allocate(2 * kMiB);
    ADD_FAILURE() << "more than the reserve was handed out";
  } catch (const MemoryError& error) {
    EXPECT_THAT(error.what(), HasSubstr("2.0 MiB do not fit into the 4.0 MiB reserved"));
    EXPECT_THAT(error.what(), HasSubstr("LOCKSTEP_SHM_RESERVE_BYTES"));
  }
  EXPECT_EQ(pool.used(), 3 * kMiB);
  // What fits still does, to the last byte.
  auto* const rest = pool.allocate(kMiB);
  std::memset(rest, 1, kMiB);
  EXPECT_THROW(pool.allocate(1), MemoryError);
  pool.free(most);
  pool.free(rest);
  std::memset(pool.allocate(4 * kMiB), 1, 4 * kMiB);
}

TEST(Pool, WithoutReserveHandsOutNothing) {
  const ReserveScope reserve(0);
  const auto team = team_of_one();
  auto& pool = *team->pool();
  EXPECT_THROW(pool.allocate(1), MemoryError);
}

TEST(Pool, SaysThatTheMachineIsExhausted) {
  const ReserveScope reserve(2 * total_memory());
  const auto team = team_of_one();
  auto& pool = *team->pool();
  auto* const before = pool.allocate(100);
  try {
    pool.allocate(total_memory() + total_memory() / 2);
    ADD_FAILURE() << "more than the machine has was handed out";
  } catch (const MemoryError& error) {
    EXPECT_THAT(error.what(), HasSubstr("of shared memory are wanted, but only"));
  }
  EXPECT_EQ(pool.used(), 128u);
  pool.free(before);
  EXPECT_EQ(pool.allocate(100), before);
}

TEST(Pool, RefusesSizesThatDoNotFitANumber) {
  const auto team = team_of_one();
  auto& pool = *team->pool();
  constexpr auto kMost = std::numeric_limits<std::size_t>::max();
  for (const auto bytes : {kMost, kMost - 1, kMost - 4095, kMost - 4096, kMost - (std::size_t{1} << 30)}) {
    EXPECT_THROW(pool.allocate(bytes), MemoryError) << bytes;
  }
  EXPECT_EQ(pool.used(), 0u);
}

TEST(Pool, KeepsBlocksApart) {
  const ReserveScope reserve(64 * kMiB);
  const auto team = team_of_one();
  auto& pool = *team->pool();
  std::mt19937 random(1);
  struct Block {
    std::byte* at;
    std::size_t bytes;
    int mark;
  };
  std::vector<Block> blocks;
  for (int i = 0; i < 3000; ++i) {
    if (blocks.size() > 50 || (!blocks.empty() && random() % 3 == 0)) {
      const auto which = random() % blocks.size();
      const auto& block = blocks[which];
      for (std::size_t at = 0; at < block.bytes; at += 97) ASSERT_EQ(static_cast<int>(block.at[at]), block.mark);
      pool.free(block.at);
      blocks.erase(blocks.begin() + static_cast<std::ptrdiff_t>(which));
      continue;
    }
    const auto bytes = 1 + random() % (random() % 4 == 0 ? 300'000 : 3000);
    blocks.push_back({pool.allocate(bytes), bytes, i % 251});
    std::memset(blocks.back().at, i % 251, bytes);
  }
  for (const auto& block : blocks) pool.free(block.at);
  EXPECT_EQ(pool.used(), 0u);
  pool.allocate(64 * kMiB);
}

TEST(Pool, MayBeUsedByManyThreads) {
  const auto team = team_of_one();
  auto& pool = *team->pool();
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      for (int i = 0; i < 500; ++i) {
        const auto bytes = static_cast<std::size_t>(1 + (i * 37 + thread) % 10'000);
        auto* const at = pool.allocate(bytes);
        std::memset(at, thread, bytes);
        EXPECT_EQ(static_cast<int>(at[bytes - 1]), thread);
        pool.free(at);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(pool.used(), 0u);
}

}  // namespace
}  // namespace lockstep::shm
