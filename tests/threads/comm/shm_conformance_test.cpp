// The conformance suite and messages over shared memory, ranks being threads.
#include "tests/support/conformance.h"

#include "lockstep/comm/backend_registry.h"
#include "lockstep/comm/group_state.h"
#include "lockstep/testing/gtest.h"
#include "tests/support/shm_messages.h"
#include "tests/support/shm_odd_tensors.h"

namespace lockstep {
namespace {

class ShmConformance : public ::testing::TestWithParam<int> {};

TEST_P(ShmConformance, HoldsForEveryCollective) {
  testing::run_threads_in_gtest({.world_size = GetParam(), .backend = "shm"}, [](const World& world) {
    conformance::check_all(world, at::kCPU);
    conformance::check_list_gathers_coalesced(world, at::kFloat);
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, ShmConformance, ::testing::Values(1, 2, 3, 4, 5));

// A world of one rank never asks for shared memory, so ask for it here.
TEST(ShmConformanceAlone, HoldsForEveryCollective) {
  testing::run_threads_in_gtest({.world_size = 1}, [](const World& world) {
    const std::chrono::seconds timeout(20);
    const auto shm = make_backend("shm", {.store = world.store(),
                                          .rank = 0,
                                          .size = 1,
                                          .group_name = "alone",
                                          .timeout = timeout,
                                          .address = "127.0.0.1"});
    const auto group = detail::wrap_backends(
        {{at::kCPU, shm}},
        {.store = world.store(), .rank = 0, .size = 1, .name = "alone", .global_ranks = {0}, .timeout = timeout});
    EXPECT_EQ(group->getBackend(at::kCPU)->getBackendName(), "shm");
    conformance::check_all(conformance::Place(group), at::kCPU);
  });
}

class ShmRanks : public ::testing::TestWithParam<int> {};

TEST_P(ShmRanks, ExchangeMessagesInOrder) {
  testing::run_threads_in_gtest({.world_size = GetParam(), .backend = "shm"}, shm_messages::check_all);
}

TEST_P(ShmRanks, TakeExpandedAndOverlappingTensors) {
  testing::run_threads_in_gtest({.world_size = GetParam(), .backend = "shm"}, shm_odd_tensors::check_all);
}

INSTANTIATE_TEST_SUITE_P(Worlds, ShmRanks, ::testing::Values(2, 3, 5));

}  // namespace
}  // namespace lockstep
