// Peers that fail: after their figures are out, before, and for good.
#include "benchmarks/kit/peer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>

#include "lockstep/base/str.h"

namespace lockstep::bench {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<std::string> shell(const std::string& script) {
  return {"/bin/sh", "-c", script};
}

TEST(Peer, ThatAbortsAfterItsFiguresAreOutHasDelivered) {
  const auto figures =
      figures_of_peer("them", shell("echo step a 1; echo step b 2; echo delivered; echo bye; kill -ABRT $$"));
  ASSERT_TRUE(figures);
  EXPECT_THAT(*figures, ElementsAre("step a 1", "step b 2"));
}

TEST(Peer, ThatFailsBeforeIsStartedOnceMoreAndTheFirstRunsFiguresAreDropped) {
  const auto mark = str(::testing::TempDir(), "/started_once");
  std::remove(mark.c_str());
  int seen = 0;
  const auto figures = figures_of_peer(
      "them", shell("echo step a 1; test -e " + mark + " || { : >" + mark + "; kill -ABRT $$; }; echo delivered"),
      [&](std::string_view) { ++seen; });
  std::remove(mark.c_str());
  ASSERT_TRUE(figures);
  EXPECT_THAT(*figures, ElementsAre("step a 1"));
  EXPECT_EQ(seen, 2);
}

TEST(Peer, ThatFailsTwiceIsLeftOutWithALine) {
  ::testing::internal::CaptureStdout();
  const auto figures = figures_of_peer("them", shell("echo step a 1; echo no such network; exit 3"));
  EXPECT_FALSE(figures);
  const auto said = ::testing::internal::GetCapturedStdout();
  EXPECT_THAT(said, HasSubstr("no rows for them here: it failed 2 times"));
  EXPECT_THAT(said, HasSubstr("no such network"));
}

TEST(Peer, ThatEndsWellButWithoutSayingThatItDeliveredIsLeftOut) {
  EXPECT_FALSE(figures_of_peer("them", shell("echo step a 1")));
}

TEST(Peer, ThatCannotBeStartedIsLeftOut) {
  EXPECT_FALSE(figures_of_peer("them", {"/no/such/program"}));
}

}  // namespace
}  // namespace lockstep::bench
