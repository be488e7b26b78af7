#include "lockstep/shm/process.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "lockstep/shm/errors.h"
#include "lockstep/shm/lifeline.h"
#include "lockstep/shm/team.h"

namespace lockstep::shm {
namespace process_test {

constexpr std::size_t kMiB = std::size_t{1} << 20;

std::shared_ptr<Team> team_of_one() {
  return Team::of_processes({.rank = 0, .size = 1}, [](const std::string& value) { return value; });
}

UniqueFd copy_of(int fd) {
  return UniqueFd(::dup(fd));
}

TEST(OwnProcess, IsOneForAllWhoHoldIt) {
  const auto first = OwnProcess::get(1);
  EXPECT_EQ(OwnProcess::get(4), first);
  const auto one = team_of_one();
  const auto other = team_of_one();
  EXPECT_EQ(one->pool().get(), &first->pool());
  EXPECT_EQ(other->pool().get(), &first->pool());
}

TEST(OwnProcess, IsANewOneOnceNobodyHoldsTheOld) {
  const auto id = OwnProcess::get(1)->id();
  EXPECT_NE(OwnProcess::get(1)->id(), id);
  // A tensor holds it too.
  const auto pool = team_of_one()->pool();
  EXPECT_EQ(&OwnProcess::get(1)->pool(), pool.get());
}

TEST(OwnProcess, IsAnotherOneForAnotherReserve) {
  const auto large = OwnProcess::get(1);
  ::setenv("LOCKSTEP_SHM_RESERVE_BYTES", "8192", 1);
  const auto small = OwnProcess::get(1);
  const auto again = OwnProcess::get(1);
  ::unsetenv("LOCKSTEP_SHM_RESERVE_BYTES");
  EXPECT_NE(small, large);
  EXPECT_EQ(small, again);
  EXPECT_EQ(small->pool().memory().size(), 8192U);
  EXPECT_EQ(OwnProcess::get(1), large);
}

TEST(OwnProcess, ReservesWhatManyRanksCanMap) {
  ::setenv("LOCKSTEP_SHM_RESERVE_BYTES", std::to_string(std::size_t{16} << 40).c_str(), 1);
  EXPECT_EQ(OwnProcess::get(4)->pool().memory().size(), std::size_t{2} << 40);
  ::unsetenv("LOCKSTEP_SHM_RESERVE_BYTES");
}

TEST(OwnProcess, BelongsToNoForkedChild) {
  const auto own = OwnProcess::get(1);
  auto* const at = own->pool().allocate(kMiB);
  const auto child = ::fork();
  if (child == 0) {
    try {
      own->pool().allocate(1);
      std::_Exit(1);
    } catch (const MemoryError& error) {
      if (std::string(error.what()).find("forked") == std::string::npos) std::_Exit(2);
    }
    own->pool().free(at);
    own->pool().trim();
    // Its own, if it makes a group.
    std::_Exit(OwnProcess::get(1) != own && OwnProcess::get(1)->id() != own->id() ? 42 : 3);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(WEXITSTATUS(status), 42);
  EXPECT_EQ(OwnProcess::get(1), own);
  EXPECT_EQ(own->pool().used(), kMiB);
}

/// One that a forked child could not close would keep a dead rank looking alive.
TEST(Lifelines, AreRefusedOnceThereIsNoPlaceToKeepThem) {
  std::vector<std::pair<UniqueFd, UniqueFd>> made;
  std::string message;
  while (message.empty() && made.size() < 100) {
    try {
      made.push_back(make_lifeline());
    } catch (const MemoryError& error) {
      message = error.what();
    }
  }
  EXPECT_THAT(message, ::testing::HasSubstr("lifelines, and there are no more"));
  for (const auto& each : made) forget_lifeline(each.first.get());
  const auto next = make_lifeline();
  forget_lifeline(next.first.get());
}

TEST(PeerProcess, IsMappedOnce) {
  const OwnProcess theirs(kMiB);
  EXPECT_EQ(PeerProcess::find(theirs.id()), nullptr);
  auto peer = PeerProcess::adopt(theirs.id(), copy_of(theirs.pool_fd()), copy_of(theirs.watched_fd()));
  EXPECT_EQ(PeerProcess::find(theirs.id()), peer);
  EXPECT_EQ(PeerProcess::adopt(theirs.id(), copy_of(theirs.pool_fd()), copy_of(theirs.watched_fd())), peer);
  peer.reset();
  EXPECT_EQ(PeerProcess::find(theirs.id()), nullptr);
}

TEST(PeerProcess, SeesThePoolAndTheEnd) {
  auto theirs = std::make_unique<OwnProcess>(kMiB);
  const auto peer = PeerProcess::adopt(theirs->id(), copy_of(theirs->pool_fd()), copy_of(theirs->watched_fd()));
  auto* const at = theirs->pool().allocate(100);
  std::strcpy(reinterpret_cast<char*>(at), "hello");
  const auto location = theirs->pool().locate(at, 100);
  ASSERT_TRUE(location);
  EXPECT_STREQ(reinterpret_cast<char*>(peer->pool() + *location), "hello");
  EXPECT_FALSE(peer->is_gone());
  theirs.reset();
  EXPECT_TRUE(peer->is_gone());
}

}  // namespace process_test
}  // namespace lockstep::shm
