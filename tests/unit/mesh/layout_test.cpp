#include "lockstep/mesh/layout.h"

#include <gtest/gtest.h>

#include <stdexcept>

namespace lockstep {
namespace {

using Lists = std::vector<std::vector<int64_t>>;

// TP-3: rows along the last axis, columns along the first
TEST(MeshLayout, DividesPositionsIntoRowsAndColumns) {
  const auto layout = MeshLayout::row_major({2, 4});
  EXPECT_EQ(tile(layout.axes()[0], 8), (Lists{{0, 4}, {1, 5}, {2, 6}, {3, 7}}));
  EXPECT_EQ(tile(layout.axes()[1], 8), (Lists{{0, 1, 2, 3}, {4, 5, 6, 7}}));
}

// TP-3: the axis in the middle
TEST(MeshLayout, DividesPositionsAlongAMiddleAxis) {
  const auto layout = MeshLayout::row_major({2, 3, 2});
  EXPECT_EQ(tile(layout.axes()[1], 12), (Lists{{0, 2, 4}, {1, 3, 5}, {6, 8, 10}, {7, 9, 11}}));
}

// TP-2: ranks stand where the array puts them, in any order
TEST(MeshLayout, PutsRanksInThePlaceOfPositions) {
  const auto layout = MeshLayout::row_major({2, 2});
  EXPECT_EQ(tile(layout.axes()[0], std::vector<int>{7, 1, 3, 5}), (std::vector<std::vector<int>>{{7, 3}, {1, 5}}));
}

TEST(MeshLayout, GivesEveryPositionItsOwnListAlongAnAxisOfOne) {
  const auto layout = MeshLayout::row_major({3, 1});
  EXPECT_EQ(tile(layout.axes()[1], 3), (Lists{{0}, {1}, {2}}));
  EXPECT_EQ(tile(layout.axes()[0], 3), (Lists{{0, 1, 2}}));
}

TEST(MeshLayout, RefusesAnAxisThatDoesNotDivideThePositions) {
  EXPECT_THROW(tile(AxisLayout({{3, 1}}), 4), std::invalid_argument);
  EXPECT_THROW(tile(AxisLayout({{2, 2}}), 6), std::invalid_argument);
}

// TP-1: row-major
TEST(MeshLayout, CountsTheLastAxisFastest) {
  EXPECT_EQ(unravel(5, {2, 4}), (std::vector<int>{1, 1}));
  EXPECT_EQ(unravel(11, {2, 3, 2}), (std::vector<int>{1, 2, 1}));
  EXPECT_EQ(MeshLayout::row_major({2, 3, 2}).flattened(), AxisLayout({{12, 1}}));
}

// TP-8: axes that are not neighbours need two extents
TEST(MeshLayout, FlattensAxesThatAreNotNeighbours) {
  const auto axes = MeshLayout::row_major({2, 2, 2}).axes();
  const auto outer_and_inner = MeshLayout({axes[0], axes[2]}).flattened();
  EXPECT_EQ(outer_and_inner.extents(), (std::vector<Extent>{{2, 4}, {2, 1}}));
  EXPECT_EQ(tile(outer_and_inner, 8), (Lists{{0, 1, 4, 5}, {2, 3, 6, 7}}));
  EXPECT_EQ(MeshLayout({axes[0], axes[1]}).flattened(), AxisLayout({{4, 2}}));
  EXPECT_EQ(outer_and_inner.stride_text(), "(4, 1)");
}

// TP-8: no overlap
TEST(MeshLayout, SeesThatAxesOverlap) {
  const auto axes = MeshLayout::row_major({2, 3, 2}).axes();
  const auto first_two = MeshLayout({axes[0], axes[1]}).flattened();
  EXPECT_FALSE(MeshLayout({first_two, axes[2]}).overlaps());
  EXPECT_FALSE(MeshLayout({axes[2], axes[0]}).overlaps());
  EXPECT_TRUE(MeshLayout({first_two, axes[1]}).overlaps());
  EXPECT_TRUE(MeshLayout({axes[2], axes[2]}).overlaps());
}

// TP-10: layouts are equal if they visit the same positions in the same order
TEST(MeshLayout, ComparesWhatAxesVisit) {
  EXPECT_EQ(AxisLayout({{2, 4}, {4, 1}}), AxisLayout({{8, 1}}));
  EXPECT_EQ(AxisLayout({{1, 5}}), AxisLayout());
  EXPECT_NE(AxisLayout({{4, 1}, {2, 4}}), AxisLayout({{8, 1}}));
  EXPECT_NE(MeshLayout::row_major({2, 4}), MeshLayout::row_major({4, 2}));
  EXPECT_NE(MeshLayout::row_major({8}), MeshLayout::row_major({1, 8}));
}

TEST(MeshLayout, KnowsWhetherPositionsRise) {
  EXPECT_TRUE(AxisLayout({{2, 4}, {2, 1}}).is_sorted());
  EXPECT_FALSE(AxisLayout({{2, 1}, {2, 4}}).is_sorted());
}

TEST(BoundedProduct, SaysWhenAShapeMakesNoSense) {
  EXPECT_EQ(bounded_product({2, 3}, 6), 6);
  EXPECT_EQ(bounded_product({}, 6), 1);
  EXPECT_EQ(bounded_product({2, 0}, 6), -1);
  EXPECT_EQ(bounded_product({-2, -3}, 6), -1);
  EXPECT_EQ(bounded_product({int64_t{1} << 40, int64_t{1} << 40}, 1000), -1);
}

}  // namespace
}  // namespace lockstep
