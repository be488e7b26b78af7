// The kit with a framework of TEST_CASEs: one of ten lines, in which a test fails by what it throws, as in Catch2 and
// doctest.
#include "lockstep/testing/test_case.h"

#include "lockstep/comm/collectives.h"
#include "lockstep/testing/gtest.h"

namespace lockstep::test_case_test {

using testing::CheckFailure;
using ::testing::HasSubstr;

std::map<std::string, void (*)()>& test_cases() {
  static std::map<std::string, void (*)()> all;
  return all;
}

bool add(const std::string& name, void (*body)()) {
  return test_cases().emplace(name, body).second;
}

/// "passed", or what it has thrown.
std::string outcome_of(const std::string& name) {
  try {
    test_cases().at(name)();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "passed";
}

#define TEST_CASE_WITH(name, body, added)    \
  static void body();                        \
  static const bool added = add(name, body); \
  static void body()
#define TEST_CASE(name) \
  TEST_CASE_WITH(name, LOCKSTEP_JOINED(test_case_, __LINE__), LOCKSTEP_JOINED(is_added_, __LINE__))

/// What REQUIRE throws: no std::exception.
struct Failed {};

LOCKSTEP_THREAD_TEST_CASE("threads: passes", 3) {
  auto tensor = at::ones({4}) * (world.rank() + 1);
  all_reduce(tensor, world.group());
  if (tensor[0].item<float>() != 6) throw Failed();
}

LOCKSTEP_THREAD_TEST_CASE("threads: fails", 2) {
  if (world.rank() == 1) throw Failed();
}

LOCKSTEP_THREAD_TEST_CASE("threads: skips", 2) {
  testing::skip_if_world_smaller_than(world, 9);
}

LOCKSTEP_PROCESS_TEST_CASE("processes: passes, [with] *signs*", 2) {
  auto tensor = at::ones({4});
  all_reduce(tensor, world.group());
  testing::check_equal("sum", tensor, at::full({4}, 2.0));
}

LOCKSTEP_PROCESS_TEST_CASE("processes: fails", 2) {
  testing::check_equal("rank", at::full({1}, world.rank()), at::zeros({1}, at::kLong), {.compare_dtype = false});
}

LOCKSTEP_PROCESS_TEST_CASE("processes: fails as REQUIRE does", 1) {
  std::cout << "rank " << world.rank() << " is wrong" << std::endl;
  throw Failed();
}

/// Leads ranks to this test, which leads them to their test case.
testing::TestFramework mini_framework() {
  return {.arguments =
              [](const std::string& /*test*/) {
                return std::vector<std::string>{"--gtest_filter=" + testing::current_test_name(), "--gtest_brief=1"};
              },
          .unset = testing::gtest_variables()};
}

// TEST-65
TEST(TestCases, FailBySayingWhichRank) {
  testing::use_framework(mini_framework());
  if (testing::is_rank_process()) {
    for (const auto& [name, body] : test_cases()) {
      if (name.starts_with("processes")) body();  // runs the one this process is a rank of, and ends
    }
    FAIL() << "a rank came to no test case";
  }
  EXPECT_EQ(test_cases().size(), 6U);
  EXPECT_EQ(outcome_of("threads: passes"), "passed");
  EXPECT_THAT(outcome_of("threads: fails"), HasSubstr("rank 1 failed: an exception that is no std::exception"));
  EXPECT_EQ(outcome_of("threads: skips"), "passed");  // and says so
  EXPECT_EQ(outcome_of("processes: passes, [with] *signs*"), "passed");
  EXPECT_THAT(outcome_of("processes: fails"), HasSubstr("rank 1 failed: rank: largest difference 1"));
  EXPECT_THAT(outcome_of("processes: fails as REQUIRE does"), HasSubstr("rank 0 is wrong"));
}

// TEST-65: failing and skipping can be the framework's own.
TEST(TestCases, UseTheFrameworksOwnWays) {
  auto framework = mini_framework();
  std::vector<std::string> said;
  framework.fail = [&](const std::string& text) { said.push_back("failed: " + text.substr(0, 13)); };
  framework.skip = [&](const std::string& reason) { said.push_back("skipped: " + reason); };
  testing::use_framework(framework);
  EXPECT_EQ(outcome_of("threads: passes"), "passed");
  EXPECT_EQ(outcome_of("threads: fails"), "passed");
  EXPECT_EQ(outcome_of("threads: skips"), "passed");
  EXPECT_EQ(said, (std::vector<std::string>{"failed: rank 1 failed", "skipped: needs 9 ranks, the world has 2"}));
  testing::use_framework({});
  EXPECT_THAT(outcome_of("processes: fails"), HasSubstr("nobody said how they come to a test"));
}

// TEST-65
TEST(TestCases, AreFoundByTheirNamesInOtherFrameworks) {
  EXPECT_EQ(testing::catch2_framework().arguments("sums, [fast] a*b"),
            std::vector<std::string>{"sums\\, \\[fast] a\\*b"});
  EXPECT_EQ(testing::doctest_framework().arguments("sums, twice")[0], "--test-case=sums\\, twice");
}

}  // namespace lockstep::test_case_test
