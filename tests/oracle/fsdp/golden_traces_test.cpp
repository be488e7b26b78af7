// The kept traces of Python's fully_shard (tests/threads/testing/golden_traces.txt) are what Python does.
#include "tests/support/golden_traces.h"
#include "tests/support/oracle_reference.h"

namespace lockstep::golden_oracle_test {

void expect_near(const std::vector<double>& one, const std::vector<double>& other) {
  ASSERT_EQ(one.size(), other.size());
  for (std::size_t i = 0; i < one.size(); ++i) EXPECT_NEAR(one[i], other[i], 1e-9 * (1 + std::abs(one[i])));
}

// TEST-65
TEST(GoldenTraces, AreUpToDate) {
  const testing::TempDir folder;
  const auto file = folder.file("traces");
  if (!oracle::run_script("fsdp/golden_traces.py", file)) GTEST_SKIP() << "there is no Python to compare with";
  const auto fresh = golden_traces::read_traces(file);
  const auto kept =
      golden_traces::read_traces(str(std::getenv("LOCKSTEP_SOURCE_DIR"), "/tests/threads/testing/golden_traces.txt"));
  ASSERT_EQ(fresh.size(), kept.size());
  for (const auto& [name, steps] : fresh) {
    SCOPED_TRACE(name);
    ASSERT_EQ(steps.size(), kept.at(name).size());
    for (std::size_t i = 0; i < steps.size(); ++i) {
      const auto& step = kept.at(name)[i];
      expect_near(steps[i].losses, step.losses);
      ASSERT_EQ(steps[i].gradients.size(), step.gradients.size());
      for (const auto& [parameter, numbers] : steps[i].gradients) expect_near(numbers, step.gradients.at(parameter));
      EXPECT_TRUE(steps[i].events == step.events) << "write the file anew: golden_traces.py FILE";
    }
  }
}

}  // namespace lockstep::golden_oracle_test
