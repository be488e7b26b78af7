// One process, many groups, ranks being threads.
#include "tests/support/shm_groups.h"

#include "lockstep/testing/gtest.h"

namespace lockstep::shm_groups_test {
namespace {

void run(int ranks, const testing::RankBody& body) {
  testing::run_threads_in_gtest({.world_size = ranks, .backend = "shm"}, body);
}

class ShmGroups : public ::testing::TestWithParam<int> {};

TEST_P(ShmGroups, TakeEachOthersTensorsWithoutACopy) {
  run(GetParam(), [](const World& world) {
    shm_groups::check_sub_groups(world);
    shm_groups::check_upwards(world);
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, ShmGroups, ::testing::Values(3, 4));

TEST(ShmGroups, OfAMeshTakeEachOthersTensorsWithoutACopy) {
  run(4, shm_groups::check_mesh);
}

}  // namespace
}  // namespace lockstep::shm_groups_test
