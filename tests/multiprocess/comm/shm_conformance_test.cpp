// The conformance suite and messages over shared memory, ranks being processes.
#include "tests/support/conformance.h"

#include "lockstep/testing/gtest.h"
#include "tests/support/shm_messages.h"
#include "tests/support/shm_odd_tensors.h"

namespace lockstep {
namespace {

class ShmConformance : public ::testing::TestWithParam<int> {};

TEST_P(ShmConformance, HoldsForEveryCollective) {
  testing::run_processes_in_gtest({.world_size = GetParam(), .backend = "shm"}, [](const World& world) {
    conformance::check_all(world, at::kCPU);
    conformance::check_list_gathers_coalesced(world, at::kFloat);
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, ShmConformance, ::testing::Values(1, 2, 3, 4, 5));

class ShmRanks : public ::testing::TestWithParam<int> {};

TEST_P(ShmRanks, ExchangeMessagesInOrder) {
  testing::run_processes_in_gtest({.world_size = GetParam(), .backend = "shm"}, shm_messages::check_all);
}

TEST_P(ShmRanks, TakeExpandedAndOverlappingTensors) {
  testing::run_processes_in_gtest({.world_size = GetParam(), .backend = "shm"}, shm_odd_tensors::check_all);
}

INSTANTIATE_TEST_SUITE_P(Worlds, ShmRanks, ::testing::Values(2, 3, 5));

}  // namespace
}  // namespace lockstep
