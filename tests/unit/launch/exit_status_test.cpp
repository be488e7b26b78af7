#include "lockstep/launch/exit_status.h"

#include <csignal>

#include "tests/unit/launch/time_limit.h"

namespace lockstep {
namespace {

TEST(ExitStatus, DescribesACode) {
  EXPECT_EQ((ExitStatus{.code = 3, .signal = {}}).describe(), "exit code 3");
}

TEST(ExitStatus, DescribesASignalByNumberAndName) {
  EXPECT_EQ((ExitStatus{.code = {}, .signal = SIGKILL}).describe(), "killed by signal 9 (Killed)");
  EXPECT_EQ((ExitStatus{.code = {}, .signal = SIGSEGV}).describe(), "killed by signal 11 (Segmentation fault)");
}

TEST(ExitStatus, IsNeitherEndedNorOkBeforeTheEnd) {
  const ExitStatus running;
  EXPECT_FALSE(running.ended());
  EXPECT_FALSE(running.ok());
  EXPECT_EQ(running.describe(), "still running");
}

TEST(ExitStatus, IsOkForCodeZeroOnly) {
  EXPECT_TRUE((ExitStatus{.code = 0, .signal = {}}).ok());
  EXPECT_FALSE((ExitStatus{.code = 1, .signal = {}}).ok());
  EXPECT_FALSE((ExitStatus{.code = {}, .signal = SIGTERM}).ok());
}

TEST(ExitStatus, TurnsIntoTheCodeAShellWouldReport) {
  EXPECT_EQ((ExitStatus{.code = 7, .signal = {}}).shell_code(), 7);
  EXPECT_EQ((ExitStatus{.code = {}, .signal = SIGABRT}).shell_code(), 134);
}

}  // namespace
}  // namespace lockstep
