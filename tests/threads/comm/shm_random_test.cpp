// Thousands of random sequences of collectives over shared memory, ranks being threads.
#include "tests/support/shm_random.h"

#include "lockstep/testing/gtest.h"

namespace lockstep {
namespace {

class ShmSequences : public ::testing::TestWithParam<int> {};

TEST_P(ShmSequences, GiveWhatTheModelGives) {
  testing::run_threads_in_gtest({.world_size = GetParam(), .backend = "shm"}, [](const World& world) {
    shm_random::check_sequences(world, static_cast<uint64_t>(world.world_size()) * 1'000'000, 700);
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, ShmSequences, ::testing::Values(2, 3, 4, 5));

}  // namespace
}  // namespace lockstep
