// Parameters in a flat buffer, and every rank's slice of it.
#include "lockstep/shard/flat_layout.h"

#include "lockstep/comm/fake/fake_backend.h"
#include "lockstep/comm/world.h"
#include "lockstep/shard/flat_shard.h"
#include "lockstep/testing/gtest.h"

namespace lockstep {
namespace {

using detail::flat_layout_of;
using detail::FlatMemory;
using detail::FlatShard;
using testing::check_equal;
using testing::expect_error;

TEST(FlatLayout, PutsOneParameterAfterTheOther) {
  const FlatLayout layout({3, 0, 5}, 2);
  EXPECT_EQ(layout.range_of(0), (ElementRange{0, 3}));
  EXPECT_EQ(layout.range_of(1), (ElementRange{3, 3}));
  EXPECT_EQ(layout.range_of(2), (ElementRange{3, 8}));
  EXPECT_EQ(layout.plan().padded(), 8);
  EXPECT_TRUE(layout.gaps().empty());
}

TEST(FlatLayout, AlignsParametersAndSlices) {
  const FlatLayout layout({3, 5, 1}, 2, {.parameters = 4, .slices = 8});
  EXPECT_EQ(layout.range_of(1), (ElementRange{4, 9}));
  EXPECT_EQ(layout.range_of(2), (ElementRange{12, 13}));
  EXPECT_EQ(layout.plan().slice, 8);
  EXPECT_EQ(layout.gaps(), (std::vector<ElementRange>{{3, 4}, {9, 12}, {13, 16}}));
  EXPECT_EQ(layout.pieces_of(0), (std::vector<FlatPiece>{{0, {0, 3}, {0, 3}}, {1, {4, 8}, {0, 4}}}));
  EXPECT_EQ(layout.pieces_of(1), (std::vector<FlatPiece>{{1, {8, 9}, {4, 5}}, {2, {12, 13}, {0, 1}}}));
}

TEST(FlatLayout, EveryElementIsOnOneRank) {
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{}, {0}, {1}, {7, 0, 13, 1}, {64, 0, 0, 3}, {0, 0, 5}}) {
    for (const int world_size : {1, 2, 3, 4, 7}) {
      for (const int64_t alignment : {1, 4}) {
        const FlatLayout layout(sizes, world_size, {.parameters = alignment, .slices = alignment});
        std::vector<int64_t> covered(sizes.size(), 0);
        std::vector<int> pieces(sizes.size(), 0);
        for (int rank = 0; rank < world_size; ++rank) {
          for (const auto& piece : layout.pieces_of(rank)) {
            EXPECT_EQ(piece.in_parameter.begin, covered[piece.index]) << "in rank order";
            EXPECT_EQ(piece.elements.size(), piece.in_parameter.size());
            EXPECT_EQ(piece.elements.begin - piece.in_parameter.begin, layout.range_of(piece.index).begin);
            covered[piece.index] += piece.elements.size();
            ++pieces[piece.index];
          }
        }
        EXPECT_EQ(covered, sizes);
        for (std::size_t i = 0; i < sizes.size(); ++i) EXPECT_GE(pieces[i], 1) << "empty ones are somewhere, too";
        for (std::size_t i = 0; i < sizes.size(); ++i) EXPECT_TRUE(sizes[i] > 0 || pieces[i] == 1);
      }
    }
  }
}

TEST(FlatLayout, RefusesWhatCannotBeLaidOut) {
  expect_error([] { FlatLayout({3, -1}, 2); }, {"[lockstep/shard] parameter 1", "-1 elements"});
  expect_error([] { FlatLayout({3}, 2, {.parameters = 0}); }, {"multiples of 0"});
  expect_error([] { FlatLayout({3}, 0); }, {"0 ranks"});
}

std::vector<at::Tensor> odd_parameters() {
  return {at::arange(6.F).view({2, 3}).t().requires_grad_(), at::empty({0}).requires_grad_(),
          at::arange(10.F, 18.F).view({4, 2}).narrow(1, 0, 1).requires_grad_()};
}

TEST(FlatShard, MakesParametersViews) {
  const auto group = make_fake_group(1, 2).group;
  const auto parameters = odd_parameters();
  const auto before = odd_parameters();
  const FlatShard shard(flat_layout_of(parameters, 2, {.slices = 8}), 1, parameters, group, FlatMemory::kViews);
  EXPECT_EQ(shard.buffer().numel(), 16);
  EXPECT_EQ(shard.own_slice().numel(), 8);
  EXPECT_EQ(shard.own_range(), (ElementRange{8, 10}));
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    check_equal("value", parameters[i].detach(), before[i].detach());
    EXPECT_TRUE(parameters[i].numel() == 0 || parameters[i].is_alias_of(shard.buffer()));
    EXPECT_TRUE(parameters[i].requires_grad() && parameters[i].is_leaf());
  }
  EXPECT_EQ(parameters[0].strides(), before[0].strides()) << "dense strides are kept";
  EXPECT_TRUE(parameters[2].is_contiguous()) << "gaps are not";
  check_equal("padding", shard.buffer().narrow(0, 10, 6), at::zeros({6}));
  shard.own_slice().fill_(7);
  EXPECT_EQ(parameters[2][3].item<float>(), 7) << "what arrives in the buffer is in the parameter";
  shard.pack();
  shard.unpack();
  EXPECT_EQ(shard.bytes(), 64);
}

TEST(FlatShard, LeavesParametersTheirMemory) {
  const auto group = make_fake_group(0, 2).group;
  const auto parameters = odd_parameters();
  const FlatShard shard(flat_layout_of(parameters, 2, {.parameters = 4}), 0, parameters, group, FlatMemory::kOwn);
  EXPECT_FALSE(parameters[0].is_alias_of(shard.buffer()));
  check_equal("packed at first", shard.place_of(0), parameters[0].detach());
  shard.buffer().fill_(5);
  EXPECT_NE(parameters[0][0][0].item<float>(), 5);
  shard.unpack();
  for (const auto& each : parameters) EXPECT_TRUE(each.eq(5).all().item<bool>());
  {
    const at::NoGradGuard no_grad;
    parameters[2].fill_(6);
  }
  shard.pack();
  check_equal("packed", shard.place_of(2), parameters[2].detach());
  EXPECT_TRUE(parameters[0].requires_grad());
}

TEST(FlatShard, RefusesParametersThatDoNotFit) {
  const auto group = make_fake_group(0, 2).group;
  const auto make = [&](const FlatLayout& layout, int rank, const std::vector<at::Tensor>& parameters) {
    return FlatShard(layout, rank, parameters, group, FlatMemory::kViews);
  };
  expect_error([&] { make(FlatLayout({2, 2}), 0, {at::ones({2}), at::ones({2}, at::kDouble)}); },
               {"[lockstep/shard]", "parameter 0 (Float[2]", "parameter 1 (Double[2]"});
  expect_error([&] { make(FlatLayout({2}), 0, {at::ones({3})}); }, {"parameter 0 (Float[3])", "2 elements"});
  expect_error([&] { make(FlatLayout({2}), 0, {}); }, {"1 parameters was given 0"});
  expect_error([&] { make(FlatLayout({2}, 2), 2, {at::ones({2})}); }, {"no rank 2", "2 ranks"});
}

}  // namespace
}  // namespace lockstep
