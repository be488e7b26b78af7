// The small things everything else stands on.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <thread>

#include "lockstep/base/deadline.h"
#include "lockstep/base/env.h"
#include "lockstep/base/observer.h"
#include "lockstep/base/rank_local.h"
#include "lockstep/base/stack_dump.h"
#include "lockstep/base/str.h"
#include "lockstep/base/unique_fd.h"

namespace lockstep {
namespace {

bool is_open(int fd) {
  return ::fcntl(fd, F_GETFD) != -1;
}

TEST(Deadline, OfAnEndlessTimeoutDoesNotOverflow) {
  const auto now = std::chrono::steady_clock::now();
  EXPECT_GT(deadline_after(std::chrono::milliseconds::max()), now + std::chrono::hours(1));
  EXPECT_LT(deadline_after(std::chrono::milliseconds(5)), now + std::chrono::hours(1));
}

TEST(UniqueFd, ClosesOnceAndMoves) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  {
    UniqueFd reader(ends[0]);
    UniqueFd moved = std::move(reader);
    EXPECT_FALSE(reader);
    EXPECT_EQ(moved.get(), ends[0]);
    EXPECT_TRUE(is_open(ends[0]));
  }
  EXPECT_FALSE(is_open(ends[0]));
  UniqueFd writer(ends[1]);
  writer.reset();
  EXPECT_FALSE(is_open(ends[1]));
}

TEST(Env, TreatsEmptyAsUnsetAndNamesWhatDoesNotParse) {
  ::setenv("LOCKSTEP_TEST_VALUE", "", 1);
  EXPECT_FALSE(env("LOCKSTEP_TEST_VALUE"));
  ::setenv("LOCKSTEP_TEST_VALUE", "12", 1);
  EXPECT_EQ(env_integer(env, "LOCKSTEP_TEST_VALUE"), 12);
  ::setenv("LOCKSTEP_TEST_VALUE", "12s", 1);
  try {
    env_integer(env, "LOCKSTEP_TEST_VALUE");
    FAIL() << "no error";
  } catch (const std::invalid_argument& error) {
    EXPECT_STREQ(error.what(), "LOCKSTEP_TEST_VALUE='12s' is not an integer");
  }
  ::unsetenv("LOCKSTEP_TEST_VALUE");
}

TEST(Str, JoinsParts) {
  EXPECT_EQ(str("rank ", 1, " of ", 4), "rank 1 of 4");
  EXPECT_EQ(join(std::vector{1, 2, 3}, ", "), "1, 2, 3");
  EXPECT_EQ(join(std::vector<int>{}, ", "), "");
}

TEST(RankLocal, GivesEveryRankItsOwnAndTheProcessOne) {
  struct Counter {
    int value = 0;
  };
  rank_local<Counter>().value = 7;
  RankScope one;
  RankScope two;
  {
    const EnterRank enter(one);
    EXPECT_EQ(rank_local<Counter>().value, 0);
    rank_local<Counter>().value = 1;
    {
      const EnterRank nested(two);
      EXPECT_EQ(rank_local<Counter>().value, 0);
    }
    EXPECT_EQ(rank_local<Counter>().value, 1);
  }
  EXPECT_EQ(rank_local<Counter>().value, 7);
  std::thread([&] { EXPECT_EQ(rank_local<Counter>().value, 7); }).join();
}

struct Listener : Observer {
  std::vector<std::string> heard;
  std::vector<uint64_t> orders;
  void on_event(const Event& event) override {
    heard.push_back(event.kind);
    orders.push_back(event.order);
  }
};

// TEST-53, TEST-54: observers belong to a rank, nest, and see numbered events; without any, nothing is observed.
TEST(Observers, ArePerRankAndNest) {
  EXPECT_FALSE(is_observed());
  Listener outer;
  RankScope rank;
  const EnterRank enter(rank);
  {
    const ObserverScope scope(outer);
    EXPECT_TRUE(is_observed());
    announce({.kind = "first"});
    Listener inner;
    {
      const ObserverScope nested(inner);
      announce({.kind = "second"});
    }
    RankScope other;
    {
      const EnterRank elsewhere(other);
      announce({.kind = "not ours"});
    }
    announce({.kind = "third"});
    EXPECT_EQ(inner.heard, std::vector<std::string>{"second"});
  }
  announce({.kind = "too late"});
  EXPECT_EQ(outer.heard, (std::vector<std::string>{"first", "second", "third"}));
  EXPECT_EQ(outer.orders, (std::vector<uint64_t>{0, 1, 2}));
  EXPECT_FALSE(is_observed());
}

[[gnu::noinline]] void wait_in_a_named_function(const std::atomic<bool>& stop) {
  while (!stop) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

TEST(StackDump, ShowsWhereAThreadIs) {
  enable_stack_dumps();
  std::atomic<bool> stop = false;
  std::thread thread([&] { wait_in_a_named_function(stop); });
  const auto stack = stack_of(thread.native_handle());
  stop = true;
  thread.join();
  EXPECT_NE(stack.find("#0"), std::string::npos) << stack;
  EXPECT_EQ(stack.find("on_stack_signal"), std::string::npos) << stack;
  EXPECT_EQ(readable_frames("prog(_ZN8lockstep3envERKi+0x1) [0x2]\n"), "  #0 lockstep::env(int const&)\n");
}

}  // namespace
}  // namespace lockstep
