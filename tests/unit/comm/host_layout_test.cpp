// Who shares a host with whom, and in which order rows travel.
#include "lockstep/comm/host_layout.h"

#include <gtest/gtest.h>

namespace lockstep::detail {
namespace {

using Order = std::vector<int64_t>;

TEST(HostLayout, NumbersHostsByTheirFirstRank) {
  const HostLayout layout({"b", "a", "a", "b", "b"});
  EXPECT_EQ(layout.ranks(), 5);
  EXPECT_EQ(layout.hosts(), 2);
  EXPECT_EQ(layout.largest(), 3);
  EXPECT_EQ(layout.ranks_on(0), (std::vector<int>{0, 3, 4}));
  EXPECT_EQ(layout.ranks_on(1), (std::vector<int>{1, 2}));
  EXPECT_EQ(layout.host_of(4), 0);
  EXPECT_EQ(layout.place_of(4), 2);
  EXPECT_EQ(layout.place_of(1), 0);
}

TEST(HostLayout, OrdersRanksHostAfterHost) {
  const HostLayout layout({"b", "a", "a", "b", "b"});
  EXPECT_EQ(layout.host_order(), (Order{0, 3, 4, 1, 2}));
  EXPECT_EQ(layout.padded_rows(), (Order{0, 3, 4, 1, 2}));
  EXPECT_FALSE(is_identity(layout.host_order(), 5));
}

TEST(HostLayout, HasNothingToMoveIfHostsFollowEachOther) {
  const HostLayout even({"a", "a", "b", "b"});
  EXPECT_TRUE(is_identity(even.host_order(), 4));
  EXPECT_TRUE(is_identity(even.padded_rows(), 4));
  // A short host in front leaves a gap.
  const HostLayout uneven({"a", "b", "b"});
  EXPECT_TRUE(is_identity(uneven.host_order(), 3));
  EXPECT_EQ(uneven.padded_rows(), (Order{0, 2, 3}));
  // One at the end leaves room nobody needs, but the rows are fewer than those that travel.
  const HostLayout last({"a", "a", "b"});
  EXPECT_FALSE(is_identity(last.padded_rows(), 4));
}

}  // namespace
}  // namespace lockstep::detail
