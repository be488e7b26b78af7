// What a pass teaches the next one about the order of units.
#include "lockstep/fsdp/touch_order.h"

#include <gtest/gtest.h>

namespace lockstep::detail {
namespace {

void touch_all(TouchOrder& order, const std::vector<int>& units) {
  for (const auto unit : units) order.touch(unit);
}

// FSDP-35
TEST(TouchOrder, KnowsNothingInTheFirstPass) {
  TouchOrder order;
  touch_all(order, {0, 0, 1});
  EXPECT_FALSE(order.is_run_over());
  EXPECT_EQ(order.next(), TouchOrder::kNone);
  EXPECT_EQ(order.order(), (std::vector<int>{0, 1}));
}

// FSDP-35
TEST(TouchOrder, KnowsWhenARunIsOverAndWhatComesNext) {
  TouchOrder order;
  touch_all(order, {0, 0, 1, 2, 2, 0});
  order.end_pass();
  order.touch(0);
  EXPECT_FALSE(order.is_run_over());
  EXPECT_EQ(order.next(), 1);
  order.touch(0);
  EXPECT_TRUE(order.is_run_over());
  touch_all(order, {1, 2, 2});
  EXPECT_TRUE(order.is_run_over());
  EXPECT_EQ(order.next(), 0);
  order.touch(0);
  EXPECT_TRUE(order.is_run_over());
  EXPECT_EQ(order.next(), TouchOrder::kNone);
}

// FSDP-35
TEST(TouchOrder, IsNotBelievedOnceItWasWrong) {
  TouchOrder order;
  touch_all(order, {0, 1, 2});
  order.end_pass();
  touch_all(order, {0, 2});
  EXPECT_EQ(order.next(), TouchOrder::kNone);
  EXPECT_FALSE(order.is_run_over());
  order.end_pass();
  order.touch(0);
  EXPECT_EQ(order.next(), 2);
  order.touch(0);  // one more than the last time
  EXPECT_FALSE(order.is_run_over());
}

// FSDP-40
TEST(TouchOrder, BeginsAnewInPassesThatNobodyEnds) {
  TouchOrder order;
  touch_all(order, {0, 1, 0});
  order.end_pass();
  // Two evaluations in a row, of which the second begins with the unit that ended the first.
  touch_all(order, {0, 1, 0, 0});
  EXPECT_EQ(order.next(), 1);
  order.touch(1);
  EXPECT_EQ(order.next(), 0);
}

// FSDP-45
TEST(TouchOrder, TakesAGuessUntilAPassWasSeen) {
  TouchOrder order;
  order.expect({2, 1, 0});
  order.touch(2);
  EXPECT_EQ(order.next(), 1);
  EXPECT_FALSE(order.is_run_over());
  order.end_pass();
  order.expect({0, 1});
  order.touch(2);
  EXPECT_EQ(order.next(), TouchOrder::kNone);
}

}  // namespace
}  // namespace lockstep::detail
