// Which streams wait for which where gradients come from several, and where inputs are moved.
#include <gtest/gtest.h>

#include "lockstep/ddp/input_mover.h"
#include "lockstep/ddp/stream_join.h"
#include "tests/support/noted_streams.h"

namespace lockstep::detail {
namespace {

const c10::Device kPretended(c10::kMeta);

using StreamJoinTest = NotedStreamsTest;

// (D-13)
TEST_F(StreamJoinTest, LetsTheCurrentStreamWaitForTheOthers) {
  StreamJoin join;
  for (const c10::StreamId id : {3, 4, 3, 5}) {
    streams_.current = id;
    join.note(kPretended);
  }
  EXPECT_EQ(notes(), Notes{});
  EXPECT_TRUE(join.join_into_current());
  EXPECT_EQ(notes(), (Notes{"event 1 on stream 3", "stream 5 waits for event 1", "event 2 on stream 4",
                            "stream 5 waits for event 2"}));
  // They are forgotten then.
  EXPECT_FALSE(join.join_into_current());
  EXPECT_EQ(notes(), Notes{});
}

// (D-13)
TEST_F(StreamJoinTest, HasNothingToDoForOneStreamOrTheHost) {
  StreamJoin join;
  join.note(c10::Device(c10::kCPU));
  join.note(kPretended);
  EXPECT_FALSE(join.join_into_current());
  EXPECT_EQ(notes(), Notes{});
}

// D-13: a gradient of another stream's is let go of as soon as its copy is enqueued.
TEST_F(StreamJoinTest, KeepsTheMemoryOfWhatItReads) {
  streams_.current = 7;
  keep_for_current_stream(at::empty({3}, at::kMeta));
  EXPECT_EQ(notes(), (Notes{"memory is used on stream 7"}));
}

using InputMoverTest = NotedStreamsTest;

// (D-17)
TEST_F(InputMoverTest, TakesOneStreamForAllInputs) {
  const auto first = streams_.next_pooled;
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(move_input(at::ones({2}), kPretended).is_meta());
  EXPECT_LE(streams_.next_pooled, first + 1);
  const auto all = notes();
  ASSERT_EQ(all.size(), 6U);
  EXPECT_TRUE(all[0].starts_with("event 1 on stream 1")) << all[0];
  EXPECT_EQ(all[0].substr(7), all[3].substr(7));
  EXPECT_EQ(all[1], "stream 0 waits for event 1");
  EXPECT_EQ(all[2], "memory is used on stream 0");
  EXPECT_EQ(all[4], "stream 0 waits for event 2");
  EXPECT_EQ(streams_.current, 0);
}

}  // namespace
}  // namespace lockstep::detail
