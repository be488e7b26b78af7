// What survivors decide after a failed reduction: the table of docs/ddp.md, "Going on after a death", and what one rank
// remembers for it.
#include "lockstep/ddp/step_recovery.h"

#include <gtest/gtest.h>

#include <limits>

#include "lockstep/lockstep.h"
#include "lockstep/testing/checks.h"
#include "lockstep/testing/interpose.h"

namespace lockstep::detail {
namespace step_recovery_test {

using testing::expect_error;
using Left = FailedReduction::Left;

/// What each rank decides, in order.
std::vector<Repair> repairs_of(const std::vector<FailedReduction>& all) {
  std::vector<Repair> repairs;
  for (const auto& each : all) repairs.push_back(repair_for(each, all));
  return repairs;
}

using Repairs = std::vector<Repair>;

TEST(RepairFor, WritesTheSumsWhereAnotherRankHasEndedTheStep) {
  // The one ahead may be anywhere in the next step, and repeats that.
  for (const auto left : {Left::kNothing, Left::kLocal, Left::kSums}) {
    EXPECT_EQ(repairs_of({{Left::kSums, 6}, {left, 7}}), (Repairs{Repair::kWriteSums, Repair::kRepeatStep}));
    EXPECT_EQ(repairs_of({{left, 7}, {Left::kSums, 6}, {Left::kSums, 6}}),
              (Repairs{Repair::kRepeatStep, Repair::kWriteSums, Repair::kWriteSums}));
  }
}

TEST(RepairFor, WritesTheSumsThatAllHave) {
  EXPECT_EQ(repairs_of({{Left::kSums, 4}}), Repairs{Repair::kWriteSums});
  EXPECT_EQ(repairs_of({{Left::kSums, 4}, {Left::kSums, 4}, {Left::kSums, 4}}), Repairs(3, Repair::kWriteSums));
}

TEST(RepairFor, ReducesAgainWhatAllHaveOfTheirOwn) {
  EXPECT_EQ(repairs_of({{Left::kLocal, 4}}), Repairs{Repair::kReduceAgain});
  EXPECT_EQ(repairs_of({{Left::kLocal, 0}, {Left::kLocal, 0}}), Repairs(2, Repair::kReduceAgain));
  EXPECT_EQ(repairs_of({{Left::kLocal, 4}, {Left::kSums, 4}, {Left::kLocal, 4}}), Repairs(3, Repair::kReduceAgain));
}

TEST(RepairFor, RepeatsTheStepWhereSomebodyHasNothing) {
  EXPECT_EQ(repairs_of({{Left::kNothing, 4}}), Repairs{Repair::kRepeatStep});
  for (const auto left : {Left::kNothing, Left::kLocal, Left::kSums}) {
    EXPECT_EQ(repairs_of({{left, 4}, {Left::kNothing, 4}}), Repairs(2, Repair::kRepeatStep));
    EXPECT_EQ(repairs_of({{Left::kNothing, 4}, {left, 4}, {Left::kSums, 4}}), Repairs(3, Repair::kRepeatStep));
  }
}

TEST(RepairFor, KeepsGradientsThatAreAverages) {
  EXPECT_EQ(repairs_of({{Left::kDone, 4}, {Left::kDone, 4}}), Repairs(2, Repair::kKeep));
  // Others may be in the next step already, or have still to end this one.
  for (const auto left : {Left::kNothing, Left::kLocal}) {
    EXPECT_EQ(repairs_of({{Left::kDone, 4}, {left, 4}, {Left::kSums, 3}}),
              (Repairs{Repair::kKeep, Repair::kRepeatStep, Repair::kWriteSums}));
  }
}

TEST(RepairFor, ThrowsOnARankThatIsTooFarBehind) {
  const FailedReduction ahead{Left::kNothing, 7};
  // What it would have to write is not there, or is that of an earlier step.
  for (const FailedReduction& behind : std::vector<FailedReduction>{
           {Left::kLocal, 6}, {Left::kNothing, 6}, {Left::kSums, 5}, {Left::kNothing, 5}, {Left::kSums, 0}}) {
    expect_error([&] { repair_for(behind, {ahead, behind}); },
                 {"recover", "finished " + std::to_string(behind.finished) + " reductions, another one 7"});
    EXPECT_EQ(repair_for(ahead, {ahead, behind}), Repair::kRepeatStep);
  }
}

TEST(FailedReduction, IsTheSameOnTheOtherSide) {
  for (const FailedReduction& each :
       std::vector<FailedReduction>{{},
                                    {Left::kLocal, 1, 0},
                                    {Left::kSums, std::numeric_limits<int64_t>::max(), 1.0 / 3},
                                    {Left::kNothing, 12345678901, 1e-300},
                                    {Left::kLocal, 2, 123456789.123456789}}) {
    const auto copy = decode_failed_reduction(encode(each));
    EXPECT_EQ(copy.left, each.left);
    EXPECT_EQ(copy.finished, each.finished);
    EXPECT_EQ(copy.weight, each.weight) << "to the last bit: all ranks divide by the sum";
  }
}

std::exception_ptr lost_peer() {
  return std::make_exception_ptr(c10::DistBackendError("rank 2 is gone"));
}

TEST(StepRecovery, PutsOffTheLossOfAPeerAndNothingElse) {
  StepRecovery recovery;
  EXPECT_FALSE(recovery.puts_off(std::make_exception_ptr(std::runtime_error("the gradient is odd"))));
  EXPECT_FALSE(recovery.puts_off(std::make_exception_ptr(c10::Error({__func__, __FILE__, __LINE__}, "a mistake"))));
  EXPECT_FALSE(recovery.has_put_off());
  recovery.begin_end(Left::kLocal);
  EXPECT_TRUE(recovery.puts_off(lost_peer()));
  EXPECT_TRUE(recovery.has_put_off());
  // At the end, with what the step leaves; and once.
  expect_error([&] { recovery.begin_end(Left::kLocal); }, {"rank 2 is gone"});
  EXPECT_EQ(recovery.failed().left, Left::kLocal);
  EXPECT_FALSE(recovery.has_put_off());
  recovery.begin_end(Left::kNothing);
  EXPECT_EQ(recovery.failed().left, Left::kNothing);
}

TEST(StepRecovery, CountsStepsThatEndAndForgetsThem) {
  const auto world = init();
  StepRecovery recovery;
  for (int step = 0; step < 3; ++step) {
    EXPECT_EQ(recovery.failed().finished, step);
    EXPECT_EQ(recovery.failed().left, step == 0 ? Left::kNothing : Left::kDone);
    recovery.begin_forward();
    EXPECT_EQ(recovery.failed().left, Left::kNothing);
    EXPECT_EQ(recovery.failed().weight, 1);
    EXPECT_FALSE(recovery.gives_zeros());
    EXPECT_TRUE(recovery.sums().empty());
    recovery.set_weight(0.25);
    recovery.set_gives_zeros(true);
    recovery.begin_end(Left::kLocal);
    EXPECT_EQ(recovery.failed().left, Left::kLocal);
    recovery.vote(world.group(), at::kCPU, {{.parameter = 4, .gradient = at::ones({2})}});
    EXPECT_EQ(recovery.failed().left, Left::kSums);
    EXPECT_EQ(recovery.failed().weight, 0.25);
    EXPECT_EQ(recovery.sums().at(0).parameter, 4U);
    EXPECT_EQ(recovery.failed().finished, step) << "not before gradients are written";
    recovery.end();
  }
}

TEST(StepRecovery, ForgetsAStepThatIsRepeatedWithoutCountingIt) {
  StepRecovery recovery;
  recovery.end();
  recovery.set_weight(0.25);
  recovery.set_gives_zeros(true);
  EXPECT_TRUE(recovery.puts_off(lost_peer()));
  recovery.forget();
  EXPECT_FALSE(recovery.has_put_off());
  EXPECT_FALSE(recovery.gives_zeros());
  EXPECT_EQ(recovery.failed().finished, 1);
  EXPECT_EQ(recovery.failed().weight, 1);
  recovery.begin_end(Left::kLocal);
  recovery.forget();
  EXPECT_EQ(recovery.failed().left, Left::kNothing);
}

// Somebody may have come through the vote, and then this rank must have what it needs.
TEST(StepRecovery, HasTheSumsIfTheVoteFails) {
  const auto world = init();
  StepRecovery recovery;
  recovery.begin_end(Left::kLocal);
  {
    const auto scope = testing::fail_call(CallKind::kAllReduce, 0, "rank 2 is gone");
    expect_error([&] { recovery.vote(world.group(), at::kCPU, {{.parameter = 0, .gradient = at::ones({2})}}); },
                 {"rank 2 is gone"});
  }
  EXPECT_EQ(recovery.failed().left, Left::kSums);
  EXPECT_EQ(recovery.sums().size(), 1U);
  EXPECT_EQ(recovery.failed().finished, 0);
}

}  // namespace step_recovery_test
}  // namespace lockstep::detail
