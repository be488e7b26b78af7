#include "lockstep/testing/combinations/covering.h"

#include <set>

#include "lockstep/base/str.h"
#include "lockstep/testing/combinations/program.h"
#include "lockstep/testing/gtest.h"

namespace lockstep::testing::covering_test {

Combinations small() {
  return Combinations({{"a", {"1", "2", "3"}}, {"b", {"x", "y"}}, {"c", {"p", "q", "r"}}, {"d", {"on", "off"}}},
                      {{.when = {"a=1|2", "b=y"}, .text = "refused"},
                       {.when = {"c=r", "d=on"}, .text = "no such thing", .kind = Rule::Kind::kSenseless}});
}

TEST(Covering, HoldsEveryPossiblePair) {
  const auto all = small();
  for (const int strength : {1, 2, 3}) {
    const auto list = all.covering(strength);
    EXPECT_TRUE(all.uncovered(list, strength).empty()) << join(all.uncovered(list, strength), "\n");
    EXPECT_EQ(list, all.covering(strength)) << "the same seed gives the same list";
  }
  EXPECT_LT(all.covering(2).size(), 3U * 2 * 3 * 2);
  EXPECT_FALSE(all.uncovered({}, 2).empty());
}

TEST(Covering, TriesEveryRefusalAloneAndNoSenselessOne) {
  const auto all = small();
  std::set<std::string> refused;
  for (const auto& combination : all.covering(2)) {
    const auto rules = all.rules_of(combination);
    if (rules.empty()) continue;
    EXPECT_EQ(rules.size(), 1U) << all.describe(combination);
    EXPECT_EQ(rules.front()->text, "refused");
    refused.insert(all.value(combination, "a"));
  }
  EXPECT_EQ(refused, (std::set<std::string>{"1", "2"}));
}

TEST(Covering, RefusesWhatWouldCoverNothing) {
  const auto all = small();
  for (const int strength : {-1, 0, 5}) {
    expect_error([&] { all.covering(strength); }, {"there are 4 axes"});
    expect_error([&] { all.uncovered({}, strength); }, {"there are 4 axes"});
  }
  expect_error([] { Combinations({{"a", {"1"}}, {"b", {}}}, {}); }, {"axis 'b' has no values"});
  expect_error([] { Combinations({{"a", {"1"}}}, {{.when = {}, .text = "never"}}); }, {"'never'", "always"});
}

TEST(Covering, ReadsWhatItWrites) {
  const auto all = small();
  const Combination combination = {2, 1, 1, 0};
  EXPECT_EQ(all.describe(combination), "a=3, b=y, c=q, d=on");
  EXPECT_EQ(all.parse(all.describe(combination)), combination);
  EXPECT_EQ(all.parse("c=q"), (Combination{0, 0, 1, 0}));
  expect_error([&] { all.parse("c=z"); }, {"'c'", "'z'", "It has 'p', 'q'"});
  expect_error([&] { all.parse("c="); }, {"'c' has no value ''"});
  expect_error([&] { all.parse("c"); }, {"'c' has no value ''"});
  expect_error([&] { all.parse("e=z"); }, {"no axis 'e'", "'a', 'b', 'c', 'd'"});
  expect_error([&] { all.parse("e=1"); }, {"'e'"});
}

TEST(Covering, HoldsEveryPairOfPrograms) {
  const auto& all = combinations::programs();
  const auto list = all.covering(2);
  EXPECT_TRUE(all.uncovered(list, 2).empty()) << join(all.uncovered(list, 2), "\n");
  std::set<const Rule*> alone;
  for (const auto& combination : list) {
    const auto rules = all.rules_of(combination);
    if (rules.size() == 1) alone.insert(rules.front());
  }
  for (const auto& rule : all.rules()) {
    EXPECT_TRUE(rule.kind == Rule::Kind::kSenseless || alone.contains(&rule)) << join(rule.when, ", ");
  }
}

}  // namespace lockstep::testing::covering_test
