// Rows of a benchmark: ratios, bounds where a term is noise, and the file that is there whatever happens later.
#include "benchmarks/kit/report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>
#include <sstream>
#include <stdexcept>

#include "lockstep/base/str.h"

namespace lockstep::bench {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

Row row_of(Figure ours, Figure theirs, Better better = Better::kLower) {
  return {
      .case_name = "step", .metric = "ms", .ours = ours, .peer = "them", .theirs = theirs, .better = better, .goal = 4};
}

Figure measured(double value) {
  return figure_of({value, value, value});
}

class ReportFile : public ::testing::Test {
 protected:
  void TearDown() override { std::remove(path_.c_str()); }

  std::string content() const {
    std::ifstream file(path_);
    std::ostringstream text;
    text << file.rdbuf();
    return text.str();
  }

  std::string path_ =
      str(::testing::TempDir(), "/", ::testing::UnitTest::GetInstance()->current_test_info()->name(), ".json");
};

TEST(Figure, IsTheMedianAndTheInterquartileRangeBesideIt) {
  const auto figure = figure_of({5, 1, 3, 2, 4});
  EXPECT_EQ(figure.value, 3);
  EXPECT_DOUBLE_EQ(figure.spread, 2.0 / 3);
  EXPECT_EQ(figure.sample_count, 5U);
  EXPECT_FALSE(figure.is_noise());
}

TEST(Figure, OfOneSampleOrOfZerosHasNoSpread) {
  EXPECT_EQ(figure_of({7}).spread, 0);
  EXPECT_EQ(figure_of({0, 0}).spread, 0);
}

TEST(Figure, OfDifferencesKnowsWhenItCannotBeToldFromZero) {
  EXPECT_TRUE(difference_figure_of({-0.5, -0.2, 0.01, 0.1, 0.3}).is_noise());
  EXPECT_TRUE(difference_figure_of({-0.5, -0.5, -0.5}).is_noise()) << "less than nothing was measured";
  EXPECT_TRUE(difference_figure_of({0.5}).is_noise()) << "one sample tells no noise";
  EXPECT_FALSE(difference_figure_of({0.9, 1, 1.1}).is_noise());
}

TEST(Ratio, IsAboveOneIfWeAreBetterWhateverTheMetric) {
  const auto faster = row_of(measured(2), measured(6)).ratio();
  ASSERT_TRUE(faster);
  EXPECT_EQ(faster->value, 3);
  EXPECT_EQ(faster->bound, Bound::kNone);
  EXPECT_EQ(row_of(measured(6), measured(2), Better::kHigher).ratio()->value, 3);
}

TEST(Ratio, OfDifferencesAboveTheNoiseIsPlain) {
  const auto ratio = row_of(difference_figure_of({0.9, 1, 1.1}), difference_figure_of({7.9, 8, 8.1})).ratio();
  ASSERT_TRUE(ratio);
  EXPECT_EQ(ratio->value, 8);
  EXPECT_EQ(ratio->bound, Bound::kNone);
}

TEST(Ratio, IsALowerBoundIfOursIsNoise) {
  // Ours is 0.1 at most, theirs 4 at least.
  const auto ratio = row_of({.value = -0.001, .noise = 0.1}, {.value = 5, .noise = 1}).ratio();
  ASSERT_TRUE(ratio);
  EXPECT_DOUBLE_EQ(ratio->value, 40);
  EXPECT_EQ(ratio->bound, Bound::kAtLeast);
}

TEST(Ratio, IsAnUpperBoundIfTheirsIsNoise) {
  const auto ratio = row_of({.value = 5, .noise = 1}, {.value = 0.5, .noise = 1.5}).ratio();
  ASSERT_TRUE(ratio);
  EXPECT_DOUBLE_EQ(ratio->value, 0.5);
  EXPECT_EQ(ratio->bound, Bound::kAtMost);
}

TEST(Ratio, OfNoiseIsNone) {
  EXPECT_FALSE(row_of({.value = 0.001, .noise = 0.1}, {.value = 0.05, .noise = 0.1}).ratio());
}

TEST_F(ReportFile, IsThereBeforeTheFirstRowAndHoldsWhatCameBeforeAFailure) {
  try {
    Report report("sample", path_);
    EXPECT_THAT(content(), HasSubstr(R"("rows": [])"));
    report.add(row_of(measured(2), measured(6)));
    throw std::runtime_error("a rank failed");
  } catch (const std::runtime_error&) {
  }
  EXPECT_THAT(content(), HasSubstr(R"("ratio": 3.0)"));
  EXPECT_THAT(content(), Not(HasSubstr("ratio_bound")));
}

TEST_F(ReportFile, SaysWhichRatiosAreBounds) {
  Report report("sample", path_);
  ::testing::internal::CaptureStdout();
  report.add(row_of({.value = 0.01, .noise = 0.1}, measured(4.4)));
  const auto table = ::testing::internal::GetCapturedStdout();
  EXPECT_THAT(table, HasSubstr("≥40"));
  EXPECT_THAT(table, HasSubstr("0.11 ms or less"));
  EXPECT_THAT(table, HasSubstr("4 reached"));
  EXPECT_THAT(content(), HasSubstr(R"("ratio_bound": "at least")"));
  EXPECT_THAT(content(), HasSubstr(R"("ours_noise": 0.1)"));
}

TEST_F(ReportFile, HasNoRowWhereAllIsNoiseAndALineSaysSo) {
  Report report("sample", path_);
  ::testing::internal::CaptureStdout();
  report.add(row_of({.value = 0.01, .noise = 0.1}, {.value = 0.01, .noise = 0.1}));
  EXPECT_THAT(::testing::internal::GetCapturedStdout(),
              HasSubstr("step: no row beside them, both are below the noise"));
  EXPECT_TRUE(report.rows().empty());
}

TEST(Report, LeavesAGoalOpenThatABoundDoesNotDecide) {
  Report report("sample");
  ::testing::internal::CaptureStdout();
  report.add(row_of({.value = 0, .noise = 1}, measured(2)));
  EXPECT_THAT(::testing::internal::GetCapturedStdout(), HasSubstr("4 undecided"));
}

}  // namespace
}  // namespace lockstep::bench
