// A rank that leaves by an exception says so; see also tests/multiprocess/join.
#include "lockstep/comm/failure_notice.h"

#include <thread>

#include "lockstep/lockstep.h"
#include "lockstep/testing/gtest.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;

std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const c10::DistBackendError& error) {
    return error.what();
  }
  return "nothing was thrown";
}

std::exception_ptr boom(const std::string& text) {
  return std::make_exception_ptr(std::runtime_error(text));
}

class FailureNotice : public ::testing::TestWithParam<std::string> {};

INSTANTIATE_TEST_SUITE_P(Backends, FailureNotice, ::testing::Values("threads", "shm"),
                         [](const auto& info) { return info.param; });

TEST_P(FailureNotice, EndsWaitsOfTheOtherRanks) {
  testing::run_threads_in_gtest({.world_size = 3, .backend = GetParam()}, [](const World& world) {
    const auto group = new_group(world.group(), {2, 1, 0}, {.name = "doomed"});
    if (world.rank() == 2) {
      std::this_thread::sleep_for(200ms);
      announce_failure(group, boom("out of paper\nand more"));
      // Neither a second reason nor one of a rank that follows hides the first.
      announce_failure(group, boom("out of ink"));
    } else {
      auto pending = launch_all_reduce(at::ones({2}), group);
      EXPECT_THAT(error_of([&] { pending.wait(); }), HasSubstr("rank 2 left by an exception: out of paper"));
      announce_failure(group, boom("only followed"));
    }
    const auto later = error_of([&] { all_reduce(at::ones({1}), group); });
    EXPECT_THAT(later, HasSubstr("left by an exception: "));
    EXPECT_EQ(later.find("out of ink"), std::string::npos);
    EXPECT_EQ(later.find("and more"), std::string::npos);
    barrier(world.group());
  });
}

TEST_P(FailureNotice, WithoutAKnownCauseNamesTheRank) {
  testing::run_threads_in_gtest({.world_size = 2, .backend = GetParam()}, [](const World& world) {
    const auto group = new_group(world.group(), {0, 1}, {.name = "doomed"});
    if (world.rank() == 0) announce_failure(group, nullptr);
    EXPECT_THAT(error_of([&] { all_reduce(at::ones({1}), group); }), HasSubstr("rank 0 left by an exception"));
    barrier(world.group());
  });
}

TEST_P(FailureNotice, OfALoneRankDoesNothing) {
  testing::run_threads_in_gtest({.world_size = 1, .backend = GetParam()}, [](const World& world) {
    announce_failure(world.group(), boom("nobody listens"));
    all_reduce(at::ones({1}), world.group());
    announce_failure(nullptr, boom("nor here"));
  });
}

TEST_P(FailureNotice, OfARefusalThatAllShareLeavesTheGroupAsItIs) {
  testing::run_threads_in_gtest({.world_size = 3, .backend = GetParam()}, [](const World& world) {
    const auto group = new_group(world.group(), {0, 1, 2});
    for (int time = 0; time < 2; ++time) {
      announce_refusal(group, boom("bad batch"));
      auto sum = at::ones({1});
      all_reduce(sum, group);
      EXPECT_EQ(sum.item<float>(), 3);
    }
    // The others did not notice, and wait.
    if (world.rank() == 1) announce_refusal(group, boom("bad batch"));
    EXPECT_THAT(error_of([&] { all_reduce(at::ones({1}), group); }),
                HasSubstr("rank 1 left by an exception: bad batch"));
    barrier(world.group());
  });
}

TEST(ShmFailureNotice, IsNotHiddenByARankThatThenAborts) {
  testing::run_threads_in_gtest({.world_size = 3, .backend = "shm"}, [](const World& world) {
    const auto group = new_group(world.group(), {0, 1, 2});
    if (world.rank() == 1) announce_failure(group, boom("out of paper"));
    barrier(world.group());
    if (world.rank() == 0) group->getBackend(at::kCPU)->abort();
    barrier(world.group());
    EXPECT_THAT(error_of([&] { all_reduce(at::ones({2}), group); }),
                HasSubstr("rank 1 left by an exception: out of paper"));
    barrier(world.group());
  });
}

TEST(ShmFailureNotice, IsNotHiddenByARankThatThenDestroysTheGroup) {
  testing::run_threads_in_gtest({.world_size = 3, .backend = "shm"}, [](const World& world) {
    auto group = new_group(world.group(), {0, 1, 2}, {.name = "doomed"});
    if (world.rank() == 1) {
      announce_failure(group, boom("out of paper"));
      world.store()->set("is announced", "yes");
    } else if (world.rank() == 0) {
      world.store()->wait({"is announced"}, 30s);
      // It has not heard of it, and goes with calls under way.
      for (int i = 0; i < 50; ++i) std::ignore = launch_all_reduce(at::ones({2}), group);
      group.reset();
      world.store()->set("is destroyed", "yes");
    } else {
      world.store()->wait({"is destroyed"}, 30s);
      EXPECT_THAT(error_of([&] { all_reduce(at::ones({2}), group); }),
                  HasSubstr("rank 1 left by an exception: out of paper"));
    }
    barrier(world.group());
  });
}

}  // namespace
}  // namespace lockstep
