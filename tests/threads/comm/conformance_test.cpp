// The conformance suite over ranks as threads.
#include "tests/support/conformance.h"

#include "lockstep/testing/gtest.h"

namespace lockstep {
namespace {

class ThreadConformance : public ::testing::TestWithParam<int> {};

// TEST-12: every collective, dtype, size and reduction.
TEST_P(ThreadConformance, HoldsForEveryCollective) {
  testing::run_threads_in_gtest({.world_size = GetParam()}, [](const World& world) {
    conformance::check_all(world, at::kCPU);
    conformance::check_list_gathers_coalesced(world, at::kFloat);
  });
}

// TEST-63: the same under random yields and late completions.
TEST_P(ThreadConformance, HoldsUnderChaos) {
  for (const uint64_t seed : {1, 2, 3}) {
    testing::run_threads_in_gtest({.world_size = GetParam(), .chaos_seed = seed}, [](const World& world) {
      for (const auto op : conformance::kOps) {
        conformance::check_all_reduce(world, at::kFloat, 31, op, at::kCPU);
        conformance::check_reduce_scatters(world, at::kFloat, 31, op, at::kCPU);
      }
      conformance::check_gathers(world, at::kLong, 31, at::kCPU);
      conformance::check_all_to_all(world, at::kBFloat16, 31, at::kCPU);
      conformance::check_broadcast(world, at::kHalf, 31, at::kCPU);
    });
  }
}

TEST_P(ThreadConformance, HoldsOnTheGpu) {
  if (testing::device_count() == 0) GTEST_SKIP() << "needs a GPU";
  testing::run_threads_in_gtest({.world_size = GetParam()},
                                [](const World& world) { conformance::check_all(world, at::Device(at::kCUDA, 0)); });
}

TEST(ThreadCalls, RefuseDifferentNumbersOfTensors) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    Call call{.kind = CallKind::kAllGather};
    for (int i = 0; i <= world.rank(); ++i) {
      call.inputs.push_back(at::ones({2}));
      for (int rank = 0; rank < 2; ++rank) call.outputs.push_back(at::zeros({2}));
    }
    testing::expect_error([&] { launch(call, world.group()).wait(); }, {"numbers of tensors"});
  });
}

TEST(ThreadCalls, TakeInputsThatOutputsOverlap) {
  testing::run_threads_in_gtest({.world_size = 3}, [](const World& world) {
    const auto tensor = at::full({3}, 1.0F * world.rank());
    all_to_all_single(tensor, tensor, world.group());
    testing::check_equal("all_to_all_single in place", tensor, at::arange(3, at::kFloat));
    const auto pieces = at::arange(3, at::kFloat);
    const auto output = pieces.narrow(0, 2, 1);
    const bool is_root = world.rank() == 0;
    const auto inputs = is_root ? pieces.split(1) : std::vector<at::Tensor>();
    scatter(output, inputs, 0, world.group());
    testing::check_equal("scatter in place", output, at::full({1}, 1.0F * world.rank()));
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, ThreadConformance, ::testing::Values(1, 2, 3, 4));

}  // namespace
}  // namespace lockstep
