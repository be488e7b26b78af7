// Who shares a host with whom, and in which order rows travel.
#include "lockstep/comm/hierarchical/host_layout.h"

#include <gtest/gtest.h>

namespace lockstep::detail {
namespace {

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
  EXPECT_EQ(HostLayout({"b", "a", "a", "b", "b"}).host_order(), (std::vector<int64_t>{0, 3, 4, 1, 2}));
  EXPECT_EQ(HostLayout({"a", "b", "b"}).host_order(), (std::vector<int64_t>{0, 1, 2}));
}

TEST(HostLayout, KnowsOneHostAndAsManyAsRanks) {
  EXPECT_EQ(HostLayout({"a", "a"}).hosts(), 1);
  EXPECT_EQ(HostLayout({"a", "b"}).largest(), 1);
}

}  // namespace
}  // namespace lockstep::detail
