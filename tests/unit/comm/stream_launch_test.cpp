// Collectives on a stream of the group's own: which stream waits for which, and what becomes of the memory. The streams
// are those of a pretended accelerator, which notes what is asked of it.
#include "lockstep/comm/stream_launch.h"

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "lockstep/comm/fake/fake_backend.h"
#include "lockstep/comm/group_state.h"
#include "lockstep/lockstep.h"
#include "tests/support/noted_streams.h"

namespace lockstep {
namespace {

/// Enqueues on the current stream and does not wait, as NCCL does.
class Enqueuing : public FakeBackend {
 public:
  explicit Enqueuing(const NotedStreams& streams) : FakeBackend(0, 2), streams_(streams) {}
  BackendTraits traits() const override { return {.runs_on_current_stream = true}; }

 protected:
  WorkPtr submit(Call&& call) override {
    streams_.notes.push_back(str(name_of(call.kind), call.is_async ? " async" : "", " on stream ", streams_.current));
    FakeBackend::submit(std::move(call));
    return nullptr;
  }

 private:
  const NotedStreams& streams_;
};

class StreamLaunchTest : public NotedStreamsTest {
 protected:
  GroupPtr make_group() {
    return detail::wrap_backends({{c10::kMeta, c10::make_intrusive<Enqueuing>(streams_)}},
                                 {.store = c10::make_intrusive<c10d::HashStore>(),
                                  .rank = 0,
                                  .size = 2,
                                  .name = "two",
                                  .global_ranks = {0, 1},
                                  .timeout = std::chrono::seconds(1)});
  }
  const at::Tensor tensor_ = at::empty({3}, at::kMeta);
};

TEST_F(StreamLaunchTest, ComputingGoesOnUntilSomebodyWaits) {
  const auto group = make_group();
  auto pending = launch_all_reduce(tensor_, group);
  EXPECT_EQ(notes(), (Notes{"event 1 on stream 0", "stream 100 waits for event 1", "all_reduce on stream 100",
                            "event 2 on stream 100"}));
  EXPECT_EQ(streams_.current, 0);
  EXPECT_FALSE(pending.is_completed());
  streams_.is_finished = true;
  EXPECT_TRUE(pending.is_completed());
  pending.wait();
  EXPECT_EQ(notes(), (Notes{"stream 0 waits for event 2"}));
  pending = {};
  EXPECT_EQ(notes(), Notes{});  // who made the tensors has waited: their memory is safe without a word to the allocator
}

TEST_F(StreamLaunchTest, ABlockingCallStaysOnTheCurrentStream) {
  const auto group = make_group();
  all_reduce(tensor_, group);
  EXPECT_EQ(notes(), (Notes{"all_reduce on stream 0"}));
}

TEST_F(StreamLaunchTest, AGroupHasOneStreamPerDevice) {
  const auto one = make_group();
  const auto other = make_group();
  launch_all_reduce(tensor_, one).wait();
  launch_broadcast(tensor_, 0, one).wait();
  launch_all_reduce(tensor_, other).wait();
  Notes calls = notes();
  std::erase_if(calls, [](const auto& note) { return note.find("_") == note.npos && note.find("cast") == note.npos; });
  EXPECT_EQ(calls, (Notes{"all_reduce on stream 100", "broadcast on stream 100", "all_reduce on stream 101"}));
}

TEST_F(StreamLaunchTest, TensorsLiveUntilTheWait) {
  const auto group = make_group();
  auto tensor = at::empty({3}, at::kMeta);
  auto pending = launch_all_reduce(tensor, group);
  EXPECT_GE(tensor.use_count(), 2U);
  pending.wait();
}

// Nobody has waited when the Pending, and with it the tensor, is dropped.
TEST_F(StreamLaunchTest, MemoryIsProtectedIfNobodyWaits) {
  const auto group = make_group();
  std::ignore = launch_all_reduce_coalesced({tensor_, at::empty({1}, at::kMeta)}, group);
  const auto all = notes();
  ASSERT_EQ(all.size(), 6U);
  EXPECT_EQ(all[4], "memory is used on stream 100");
  EXPECT_EQ(all[5], "memory is used on stream 100");
}

// The tensor's own stream may give its memory away before stream 5 has come to wait.
TEST_F(StreamLaunchTest, MemoryIsProtectedIfAnotherStreamWaits) {
  const auto group = make_group();
  auto pending = launch_all_reduce(tensor_, group);
  notes();
  streams_.current = 5;
  pending.wait();
  pending = {};
  EXPECT_EQ(notes(), (Notes{"stream 5 waits for event 2", "memory is used on stream 100"}));
  streams_.current = 0;
}

}  // namespace
}  // namespace lockstep
