#include "lockstep/ddp/scatter_gather.h"

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <tuple>

#include "lockstep/testing/gtest.h"

namespace lockstep {
namespace {

const std::vector<c10::Device> kTwo = {c10::kCPU, c10::kCPU};

// DDP-5
TEST(ScatterGather, RoundTripOnAnyDim) {
  const auto batch = at::arange(30, at::kFloat).view({2, 5, 3});
  for (const int64_t dim : {0, 1, 2, -1}) {
    const auto parts = scatter_to_devices(batch, kTwo, dim);
    ASSERT_EQ(parts.size(), 2U);
    EXPECT_EQ(parts[0].size(dim), (batch.size(dim) + 1) / 2);
    EXPECT_TRUE(at::equal(gather_from_devices(parts, c10::kCPU, dim), batch)) << dim;
  }
}

// DDP-5
TEST(ScatterGather, KeepStructureAndCopyTheRest) {
  using Batch = std::tuple<std::map<std::string, at::Tensor>, int, std::vector<at::Tensor>>;
  const Batch batch{{{"tokens", at::arange(8).view({4, 2})}}, 7, {at::ones({4}), at::zeros({4, 1})}};
  const auto parts = scatter_to_devices(batch, kTwo);
  ASSERT_EQ(parts.size(), 2U);
  EXPECT_TRUE(at::equal(std::get<0>(parts[1]).at("tokens"), at::arange(4, 8).view({2, 2})));
  EXPECT_EQ(std::get<1>(parts[1]), 7);
  const auto again = gather_from_devices(parts, c10::kCPU);
  EXPECT_TRUE(at::equal(std::get<0>(again).at("tokens"), std::get<0>(batch).at("tokens")));
  EXPECT_TRUE(at::equal(std::get<2>(again)[1], std::get<2>(batch)[1]));
}

// DDP-5
TEST(ScatterGather, ShortBatchesHaveFewerPartsAndLossesBecomeAVector) {
  EXPECT_EQ(scatter_to_devices(at::ones({1, 4}), kTwo).size(), 1U);
  EXPECT_TRUE(
      at::equal(gather_from_devices(std::vector{at::tensor(1.0), at::tensor(2.0)}, c10::kCPU), at::tensor({1.0, 2.0})));
}

TEST(ScatterGather, GradientsFlowThrough) {
  const auto batch = at::ones({3, 2}).requires_grad_();
  (gather_from_devices(scatter_to_devices(batch, kTwo), c10::kCPU) * 2).sum().backward();
  EXPECT_TRUE(at::equal(batch.grad(), at::full({3, 2}, 2)));
}

TEST(ScatterGather, RefuseWhatHasNoPartsOrOtherParts) {
  testing::expect_error([] { scatter_to_devices(at::ones({}), kTwo); }, {"without dims"});
  testing::expect_error([] { scatter_to_devices(at::ones({2}), {}); }, {"at least one device"});
  testing::expect_error([] { gather_from_devices(std::vector<at::Tensor>{}, c10::kCPU); }, {"empty"});
  using List = std::vector<at::Tensor>;
  testing::expect_error([] { gather_from_devices(std::vector<List>{{at::ones({1})}, {}}, c10::kCPU); },
                        {"part 1", "alike"});
}

}  // namespace
}  // namespace lockstep
