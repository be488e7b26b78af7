// The conformance suite over gloo, and over NCCL where there is a GPU for every rank.
#include "tests/support/conformance.h"

#include "lockstep/comm/backend_registry.h"
#include "lockstep/comm/group_state.h"
#include "lockstep/testing/gtest.h"

namespace lockstep {
namespace {

class GlooConformance : public ::testing::TestWithParam<int> {};

TEST_P(GlooConformance, HoldsForEveryCollective) {
  testing::run_processes_in_gtest({.world_size = GetParam(), .backend = "gloo"},
                                  [](const World& world) { conformance::check_all(world, at::kCPU); });
}

// Several ranks share one GPU: gloo takes CUDA tensors for the collectives training needs.
TEST_P(GlooConformance, HoldsForTensorsOnASharedGpu) {
  if (testing::device_count() == 0) GTEST_SKIP() << "needs a GPU";
  testing::run_processes_in_gtest({.world_size = GetParam(), .backend = "gloo"}, [](const World& world) {
    const at::Device gpu(at::kCUDA, 0);
    for (const auto dtype : {at::kFloat, at::kHalf}) {
      for (const auto op : {ReduceOp::SUM, ReduceOp::AVG, ReduceOp::MAX}) {
        conformance::check_all_reduce(world, dtype, 31, op, gpu);
      }
      conformance::check_broadcast(world, dtype, 31, gpu);
      conformance::check_all_reduce_coalesced(world, dtype, ReduceOp::SUM, gpu);
      conformance::check_gathers_coalesced(world, dtype, gpu);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, GlooConformance, ::testing::Values(1, 2, 3, 4));

class NcclConformance : public ::testing::TestWithParam<int> {};

TEST_P(NcclConformance, HoldsForEveryCollective) {
  if (!is_backend_registered("nccl")) GTEST_SKIP() << "this build has no NCCL";
  if (testing::device_count() < GetParam()) GTEST_SKIP() << "needs a GPU per rank";
  testing::run_processes_in_gtest({.world_size = GetParam(), .backend = "cpu:gloo,cuda:nccl"},
                                  [](const World& world) { conformance::check_all(world, world.device()); });
}

INSTANTIATE_TEST_SUITE_P(Worlds, NcclConformance, ::testing::Values(2, 3, 4));

// A world of one rank never asks NCCL, so ask it here: a machine with one GPU can show that much.
TEST(NcclConformance, HoldsForOneRank) {
  if (!is_backend_registered("nccl")) GTEST_SKIP() << "this build has no NCCL";
  if (testing::device_count() == 0) GTEST_SKIP() << "needs a GPU";
  testing::run_processes_in_gtest({.world_size = 1}, [](const World& world) {
    const auto nccl = make_backend("nccl", {.store = world.store(),
                                            .rank = 0,
                                            .size = 1,
                                            .group_name = "alone",
                                            .timeout = std::chrono::seconds(60),
                                            .address = "127.0.0.1"});
    const auto group = detail::wrap_backends({{at::kCUDA, nccl}}, {.store = world.store(),
                                                                   .rank = 0,
                                                                   .size = 1,
                                                                   .name = "alone",
                                                                   .global_ranks = {0},
                                                                   .timeout = std::chrono::seconds(60)});
    EXPECT_EQ(group->getBackend(at::kCUDA)->getBackendName(), "nccl");
    conformance::check_all(conformance::Place(group), world.device());
  });
}

}  // namespace
}  // namespace lockstep
