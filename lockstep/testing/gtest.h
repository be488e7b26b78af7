// The kit for GoogleTest. A multi-rank test in five lines:
//
//   LOCKSTEP_RANK_TEST(AllReduce, SumsOverRanks, 3) {
//     auto tensor = at::ones({4}) * (world.rank() + 1);
//     lockstep::all_reduce(tensor, world.group());
//     EXPECT_EQ(tensor[0].item<float>(), 6);
//   }
//
// The body runs on every rank; `world` is the rank's. EXPECT_* and ASSERT_* work, exceptions fail the test, Skip skips
// it.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "lockstep/base/str.h"
#include "lockstep/dtensor/dtensor.h"
#include "lockstep/testing/checks.h"
#include "lockstep/testing/continuous.h"
#include "lockstep/testing/process_ranks.h"
#include "lockstep/testing/skip.h"
#include "lockstep/testing/subtests.h"
#include "lockstep/testing/thread_ranks.h"

namespace at {

/// How GoogleTest prints values: libtorch's operator<< throws for a DTensor, whose values other ranks have.
inline void PrintTo(const Tensor& tensor, std::ostream* out) {
  if (lockstep::is_dtensor(tensor)) {
    *out << lockstep::DTensor(tensor);
  } else {
    *out << tensor;
  }
}

}  // namespace at

namespace lockstep::testing {

/// Turns GoogleTest's own results inside a rank into what the kit understands.
inline RankBody with_gtest_results(RankBody body) {
  return [body = std::move(body)](const World& world) {
    body(world);
    const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
    if (test == nullptr) return;
    if (::testing::Test::IsSkipped()) throw Skip{SkipCode::kFeatureMissing, "skipped in the test body"};
    if (!is_rank_process()) {
      // Rank threads share one result; a fatal failure anywhere must end all of them.
      if (::testing::Test::HasFatalFailure()) throw CheckFailure("an assertion failed, see above");
      return;
    }
    if (!test->result()->Failed()) return;
    std::string text;
    for (int i = 0; i < test->result()->total_part_count(); ++i) {
      const auto& part = test->result()->GetTestPartResult(i);
      if (part.failed())
        text += std::string(part.file_name()) + ":" + std::to_string(part.line_number()) + ": " + part.message() + "\n";
    }
    throw CheckFailure(text);
  };
}

/// Makes a run's report the result of the current test.
inline void report_to_gtest(const RunReport& report) {
  if (const auto reason = report.skipped()) {
    GTEST_SKIP() << *reason;
  }
  EXPECT_TRUE(report.has_passed()) << report.describe();
}

/// run_subtests() whose EXPECT_* failures show the values too.
inline void run_subtests_in_gtest(const World& world,
                                  const std::vector<std::pair<std::string, std::vector<SubtestValue>>>& values,
                                  const std::function<void(const Subtest& subtest)>& body,
                                  const SubtestOptions& options = {}) {
  run_subtests(
      world, values,
      [&](const Subtest& subtest) {
        const ::testing::ScopedTrace trace(__FILE__, __LINE__, "subtest " + subtest.describe());
        body(subtest);
      },
      options);
}

inline void run_threads_in_gtest(const RunOptions& options, const RankBody& body) {
  report_to_gtest(run_threads(options, with_gtest_results(body)));
}

/// "Suite.Test" of the test that runs.
inline std::string current_test_name() {
  const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
  return std::string(test->test_suite_name()) + "." + test->name();
}

/// GoogleTest's own variables: shards, filters and reports are the parent's business.
inline std::vector<std::string> gtest_variables() {
  return {"GTEST_TOTAL_SHARDS", "GTEST_SHARD_INDEX", "GTEST_SHARD_STATUS_FILE", "GTEST_FILTER", "GTEST_REPEAT",
          "GTEST_SHUFFLE",      "GTEST_OUTPUT",      "GTEST_FAIL_FAST",         "GTEST_BRIEF"};
}

/// How often the current test has asked this, from 0: a fresh process that comes to the test counts the same.
inline int next_call_number(const std::string& label) {
  static std::map<std::string, int> counts;
  static std::pair<const void*, std::int64_t> counted;
  const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
  const std::pair<const void*, std::int64_t> current = {test, test->result()->start_timestamp()};
  if (counted != current) counts.clear();
  counted = current;
  return counts[label]++;
}

/// How a fresh process comes to the current test, and to this call of it. `label` tells calls apart that not every
/// process comes to.
inline ProcessCall call_from_gtest(const std::string& label = "") {
  const auto name = current_test_name();
  const auto number = next_call_number(label);
  return {.name = str(name, label.empty() ? "" : "#", label, number == 0 ? "" : str("#", number)),
          .arguments = {"--gtest_filter=" + name, "--gtest_brief=1"},
          .unset = gtest_variables()};
}

inline RunReport run_processes_from_gtest(const RunOptions& options, const RankBody& body,
                                          const std::string& label = "") {
  return run_processes(options, call_from_gtest(label), with_gtest_results(body));
}

inline void run_processes_in_gtest(const RunOptions& options, const RankBody& body) {
  report_to_gtest(run_processes_from_gtest(options, body));
}

/// Fixture whose tests share one set of rank processes (continuous mode). Derive with the suite's own type:
///   class Fast : public ContinuousTest<Fast> {};    TEST_F(Fast, Sums) { run([](const World& world) { … }); }
template <class Suite>
class ContinuousTest : public ::testing::Test {
 public:
  static RunOptions options() { return {}; }

  static void SetUpTestSuite() {
    const auto* suite = ::testing::UnitTest::GetInstance()->current_test_suite();
    if (ranks()) return;  // a rank process on its next round
    // A rank goes round and round through the suite until the parent says it is over, so filters and shuffling do not
    // matter.
    ranks() = std::make_unique<ContinuousRanks>(
        Suite::options(), ProcessCall{.name = suite->name(),
                                      .arguments = {"--gtest_filter=" + std::string(suite->name()) + ".*",
                                                    "--gtest_brief=1", "--gtest_repeat=-1"},
                                      .unset = gtest_variables()});
  }
  static void TearDownTestSuite() {
    if (!is_rank_process()) ranks().reset();
  }

 protected:
  /// Call it from the test body itself: a skip returns from here, not from the test.
  void run(const RankBody& body) { report_to_gtest(ranks()->run(current_test_name(), with_gtest_results(body))); }

  static std::unique_ptr<ContinuousRanks>& ranks() {
    static std::unique_ptr<ContinuousRanks> instance;
    return instance;
  }
};

}  // namespace lockstep::testing

/// A test whose ranks are threads.
#define LOCKSTEP_THREAD_TEST(suite, name, ranks)                                                  \
  static void suite##_##name##_on_rank([[maybe_unused]] const ::lockstep::World& world);          \
  TEST(suite, name) {                                                                             \
    ::lockstep::testing::run_threads_in_gtest({.world_size = (ranks)}, suite##_##name##_on_rank); \
  }                                                                                               \
  static void suite##_##name##_on_rank([[maybe_unused]] const ::lockstep::World& world)

/// A test whose ranks are processes.
#define LOCKSTEP_PROCESS_TEST(suite, name, ranks)                                                   \
  static void suite##_##name##_on_rank([[maybe_unused]] const ::lockstep::World& world);            \
  TEST(suite, name) {                                                                               \
    ::lockstep::testing::run_processes_in_gtest({.world_size = (ranks)}, suite##_##name##_on_rank); \
  }                                                                                                 \
  static void suite##_##name##_on_rank([[maybe_unused]] const ::lockstep::World& world)

/// The same body in both harnesses: tests name_AsThreads and name_AsProcesses.
#define LOCKSTEP_RANK_TEST(suite, name, ranks)                                                      \
  static void suite##_##name##_on_rank([[maybe_unused]] const ::lockstep::World& world);            \
  TEST(suite, name##_AsThreads) {                                                                   \
    ::lockstep::testing::run_threads_in_gtest({.world_size = (ranks)}, suite##_##name##_on_rank);   \
  }                                                                                                 \
  TEST(suite, name##_AsProcesses) {                                                                 \
    ::lockstep::testing::run_processes_in_gtest({.world_size = (ranks)}, suite##_##name##_on_rank); \
  }                                                                                                 \
  static void suite##_##name##_on_rank([[maybe_unused]] const ::lockstep::World& world)
