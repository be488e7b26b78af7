// From figures of contenders to rows.
#include "benchmarks/kit/training.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "benchmarks/kit/workload.h"

namespace lockstep::bench {
namespace {

using ::testing::ElementsAre;
using ::testing::Pair;

TEST(Differences, AreTakenRoundByRound) {
  const auto found = differences({{"ours", {5, 7}}, {"them", {9, 8}}, {"local", {4, 5}}, {"their-local", {1, 2}}},
                                 {{"ours", "local"}, {"them", "their-local"}});
  EXPECT_THAT(found, ElementsAre(Pair("ours", ElementsAre(1, 2)), Pair("them", ElementsAre(8, 6))));
}

TEST(Differences, AreLeftOutWhereOneOfTheTwoWasNotMeasured) {
  EXPECT_TRUE(differences({{"ours", {5}}}, {{"ours", "local"}, {"them", "ours"}}).empty());
}

TEST(PeerRows, AreOfThoseThatWereMeasuredScaledAndWithTheirGoals) {
  Report report("test");
  add_peer_rows(report,
                {.case_name = "step",
                 .metric = "us",
                 .ours = "ours",
                 .peers = {"missing", "slow", "quick"},
                 .goals = {{"slow", 3}},
                 .scale = 10},
                {{"ours", {1, 2, 3}}, {"slow", {8}}, {"quick", {1}}});
  ASSERT_EQ(report.rows().size(), 2U);
  const auto& slow = report.rows()[0];
  EXPECT_EQ(slow.peer, "slow");
  EXPECT_EQ(slow.ours.value, 20);
  EXPECT_EQ(slow.theirs.value, 80);
  EXPECT_EQ(slow.ratio()->value, 4);
  EXPECT_EQ(slow.goal, 3);
  EXPECT_EQ(report.rows()[1].goal, std::nullopt);
}

TEST(PeerRows, OfABoundHoldADifferenceAgainstIt) {
  Report report("test");
  add_peer_rows(report, {.case_name = "host", .ours = "ours", .peers = {"bound"}, .are_differences = true},
                {{"ours", {5, 5, 5}}, {"bound", {20, 20, 20}}});
  ASSERT_EQ(report.rows().size(), 1U);
  EXPECT_EQ(report.rows()[0].ratio()->value, 4);
  EXPECT_EQ(report.rows()[0].ratio()->bound, Bound::kNone);
}

TEST(PeerRows, NeedOurs) {
  Report report("test");
  add_peer_rows(report, {.case_name = "step", .ours = "ours", .peers = {"them"}}, {{"them", {1}}});
  EXPECT_TRUE(report.rows().empty());
}

TEST(Workloads, NameTheBlocksThatRepeat) {
  EXPECT_EQ(make_workload("mlp", 32, at::kCPU).module->blocks().size(), 8U);
  EXPECT_EQ(make_workload("300-layers", 4, at::kCPU).module->blocks().size(), 300U);
  EXPECT_EQ(make_workload("gpt", 32, at::kCPU).module->blocks().size(), 2U);
}

}  // namespace
}  // namespace lockstep::bench
