// What the shm backend promises, ranks being threads.
#include "tests/support/shm_promises.h"

#include "lockstep/testing/gtest.h"
#include "tests/support/shm_order.h"
#include "tests/support/shm_refusals.h"

namespace lockstep {
namespace {

void run(int ranks, const testing::RankBody& body) {
  testing::run_threads_in_gtest({.world_size = ranks, .backend = "shm"}, body);
}

class ShmPromises : public ::testing::TestWithParam<int> {};

TEST_P(ShmPromises, SameBitsWhateverTheChunking) {
  run(GetParam(), [](const World& world) { shm_promises::check_same_bits(world); });
}

TEST_P(ShmPromises, ZeroCopyTensors) {
  run(GetParam(), [](const World& world) {
    shm_promises::check_zero_copy(world);
    shm_promises::check_in_place(world);
    shm_promises::check_memory_outlives_group(world);
    shm_promises::check_tensor_grows_beyond_group(world);
  });
}

TEST_P(ShmPromises, RefusesWhatRanksDisagreeOn) {
  run(GetParam(), [](const World& world) {
    shm_refusals::check_disagreements(world);
    shm_refusals::check_scatter_sizes(world);
  });
}

TEST_P(ShmPromises, RefusesMalformedCalls) {
  run(GetParam(), shm_refusals::check_malformed);
}

TEST_P(ShmPromises, MakesCallsInOrderWhileTheCallerComputes) {
  run(GetParam(), [](const World& world) {
    shm_order::check_many_in_flight(world);
    shm_order::check_strided_in_order(world);
    shm_order::check_futures(world);
    shm_order::check_two_groups(world);
    shm_order::check_wait_with_a_limit(world);
    shm_order::check_dropped(world);
    shm_order::check_mixed_with_blocking(world);
  });
}

TEST_P(ShmPromises, LetsCallbacksCommunicate) {
  run(GetParam(), [](const World& world) {
    shm_order::check_callback_that_waits(world, [](Pending& later) { later.wait(); });
    shm_order::check_callback_that_communicates(world);
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, ShmPromises, ::testing::Values(2, 3, 4));

TEST(ShmCallbacks, MayWaitForFutures) {
  run(2, [](const World& world) {
    shm_order::check_callback_that_waits(world, [](Pending& later) { later.future()->wait(); });
  });
}

TEST(ShmAbsence, OfALateRankIsNamed) {
  run(4, [](const World& world) {
    shm_refusals::check_late_rank(world);
    shm_refusals::check_timeout_of_call(world);
  });
}

TEST(ShmAbsence, OfARankThatLeftIsNamed) {
  run(4, [](const World& world) {
    shm_refusals::check_rank_that_leaves(world, [](const GroupPtr&) { return at::Tensor(); });
    shm_refusals::check_rank_that_leaves_in_a_call(world);
  });
}

}  // namespace
}  // namespace lockstep
