// A time limit for every test of the binary that includes this: a test that hangs aborts the run and names itself.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstring>

namespace lockstep::testing_internal {

class TimeLimit : public ::testing::EmptyTestEventListener {
 public:
  explicit TimeLimit(unsigned seconds) : seconds_(seconds) {}

  void OnTestStart(const ::testing::TestInfo& test) override {
    std::snprintf(message_, sizeof(message_), "time limit of %u s is over in %s.%s\n", seconds_, test.test_suite_name(),
                  test.name());
    std::signal(SIGALRM, [](int) {
      (void)!::write(STDERR_FILENO, message_, std::strlen(message_));
      std::abort();
    });
    ::alarm(seconds_);
  }

  void OnTestEnd(const ::testing::TestInfo&) override { ::alarm(0); }

 private:
  const unsigned seconds_;
  static inline char message_[256];
};

// One definition in the program, however many files include this.
inline const bool kTimeLimitInstalled = [] {
  ::testing::UnitTest::GetInstance()->listeners().Append(new TimeLimit(180));
  return true;
}();

}  // namespace lockstep::testing_internal
