// Who gets what, by sizes alone.
#include "lockstep/zero/partition.h"

#include <numeric>

namespace lockstep {
namespace {

using ::testing::ElementsAre;
using testing::expect_error;

std::vector<int64_t> loads_of(const PositionsPerRank& partition, const std::vector<std::vector<int64_t>>& sizes) {
  std::vector<int64_t> loads;
  for (const auto& groups : partition) {
    int64_t load = 0;
    for (std::size_t i = 0; i < groups.size(); ++i) {
      for (const auto position : groups[i]) load += sizes[i][position];
    }
    loads.push_back(load);
  }
  return loads;
}

// ZERO-9
TEST(Partition, GivesTheLargestToTheLeastLoaded) {
  for (const int world_size : {1, 2, 3, 4}) {
    std::vector<int64_t> sizes;
    for (int i = 0; i < world_size; ++i) sizes.insert(sizes.end(), {9, 7, 5, 3});
    EXPECT_THAT(loads_of(partition_by_size({sizes}, world_size), {sizes}), ::testing::Each(24)) << world_size;
  }
  EXPECT_EQ(partition_by_size({{4, 4, 4}}, 2), (PositionsPerRank{{{0, 2}}, {{1}}}));
  EXPECT_EQ(partition_by_size({{100, 3, 5, 2, 6, 4}}, 2), (PositionsPerRank{{{0}}, {{4, 2, 5, 1, 3}}}));
}

// ZERO-9
TEST(Partition, CarriesLoadsFromGroupToGroup) {
  EXPECT_EQ(partition_by_size({{10}, {4, 4}, {1}}, 2), (PositionsPerRank{{{0}, {}, {}}, {{}, {0, 1}, {0}}}));
}

// ZERO-29
TEST(Partition, OfMoreGroupsLeavesTheFirstWhereTheyWere) {
  const std::vector<std::vector<int64_t>> sizes = {{9, 7, 5, 3, 9, 7, 5}, {3}, {1, 2, 30}};
  for (const int world_size : {1, 2, 3, 5}) {
    const auto before = partition_by_size({sizes[0]}, world_size);
    const auto after = partition_by_size(sizes, world_size);
    for (int rank = 0; rank < world_size; ++rank) EXPECT_EQ(before[rank][0], after[rank][0]);
  }
  EXPECT_THAT(loads_of(partition_by_size({sizes[0], sizes[1]}, 2), sizes), ElementsAre(24, 24));
}

// ZERO-10
TEST(Partition, LeavesRanksWithoutParameters) {
  EXPECT_EQ(partition_by_size({{2, 0}}, 4), (PositionsPerRank{{{0}}, {{1}}, {{}}, {{}}}));
  EXPECT_EQ(partition_by_size({{}}, 2), (PositionsPerRank{{{}}, {{}}}));
}

// ZERO-14
TEST(LeastLoaded, PassesOverThoseThatAreBarred) {
  EXPECT_EQ(least_loaded({3, 1, 1}), 1U);
  EXPECT_EQ(least_loaded({3, 1, 1}, {false, true, false}), 2U);
  EXPECT_EQ(least_loaded({3, 1, 1}, {false, true, true}), 0U);
  expect_error([] { least_loaded({3, 1}, {true, true}); }, {"all of the 2 ranks are barred"});
  expect_error([] { least_loaded({}); }, {"all of the 0 ranks"});
}

// ZERO-66
TEST(SlicePlan, CoversEveryElementOnceInEqualSlices) {
  for (const int64_t total : {0, 1, 15, 16, 17, 1000, 4099}) {
    for (const int world_size : {1, 2, 3, 4, 7}) {
      for (const int64_t alignment : {1, 16}) {
        const auto plan = plan_slices(total, world_size, alignment);
        EXPECT_EQ(plan.slice % alignment, 0);
        EXPECT_LT(plan.slice, (total + world_size - 1) / world_size + alignment) << "beyond the mean by alignment";
        EXPECT_GE(plan.padded(), total);
        int64_t covered = 0;
        for (int rank = 0; rank < world_size; ++rank) {
          const auto slice = plan.slice_of(rank);
          EXPECT_EQ(slice.begin, covered);
          EXPECT_LE(slice.size(), plan.slice);
          covered = slice.end;
          for (auto element = slice.begin; element < slice.end; ++element) EXPECT_EQ(plan.rank_of(element), rank);
        }
        EXPECT_EQ(covered, total);
        EXPECT_EQ(plan.rank_of(total), plan.rank_of(std::max<int64_t>(total - 1, 0)));
      }
    }
  }
  expect_error([] { plan_slices(4, 0, 1); }, {"cannot cut 4 elements for 0 ranks"});
}

TEST(ElementRange, Intersects) {
  EXPECT_EQ(intersection({0, 5}, {3, 9}), (ElementRange{3, 5}));
  EXPECT_TRUE(intersection({0, 3}, {3, 9}).is_empty());
  EXPECT_TRUE(intersection({7, 9}, {0, 3}).is_empty());
  EXPECT_EQ(intersection({7, 9}, {0, 3}).size(), 0);
}

}  // namespace
}  // namespace lockstep
