// Labels of collectives: where they come from and where they are shown.
#include "lockstep/comm/call_label.h"

#include <gtest/gtest.h>

#include <thread>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "lockstep/comm/fake/fake_backend.h"
#include "lockstep/comm/group_state.h"
#include "lockstep/lockstep.h"
#include "lockstep/testing/checks.h"
#include "lockstep/testing/recorder.h"

namespace lockstep {
namespace {

using testing::expect_error;

TEST(CallLabel, IsShownBehindTheOperation) {
  Call call{.kind = CallKind::kAllReduce, .inputs = {at::ones({1000})}};
  EXPECT_EQ(call.describe(), "all_reduce(sum, Float[1000])");
  EXPECT_EQ(call.describe(12), "all_reduce(sum, Float[1000]) #12");
  call.label = {"DDP bucket", 3};
  EXPECT_EQ(call.describe(), "all_reduce(sum, Float[1000]) of DDP bucket 3");
  EXPECT_EQ(call.describe(12), "all_reduce(sum, Float[1000]) #12 of DDP bucket 3");
  call.label = {"Join's control message"};
  EXPECT_EQ(call.describe(), "all_reduce(sum, Float[1000]) of Join's control message");
}

TEST(CallLabel, IsTheInnermostScopesOfTheThread) {
  const auto [group, backend] = make_fake_group(0, 2);
  all_reduce(at::ones({1}), group);
  {
    const LabelScope outer({"bucket", 0});
    all_reduce(at::ones({1}), group);
    {
      const LabelScope inner({"bucket", 1});
      all_reduce(at::ones({1}), group);
      launch({.kind = CallKind::kAllReduce, .inputs = {at::ones({1})}, .is_async = false, .label = {"own"}}, group)
          .wait();
    }
    all_reduce(at::ones({1}), group);
    std::thread([&, group = group] { all_reduce(at::ones({1}), group); }).join();
  }
  std::vector<std::string> labels;
  for (const auto& call : backend->calls()) labels.push_back(call.label.str());
  EXPECT_EQ(labels, (std::vector<std::string>{"", "bucket 0", "bucket 1", "own", "bucket 0", ""}));
}

TEST(CallLabel, IsTheUnitOfEvents) {
  const auto [group, backend] = make_fake_group(0, 2);
  testing::Recorder recorder;
  {
    const LabelScope label({"bucket", 7});
    all_reduce(at::ones({1}), group);
  }
  all_reduce(at::ones({1}), group);
  testing::expect_exact_order(recorder.events("launch"), {"all_reduce(bucket 7)", "all_reduce"});
  testing::expect_exact_order(recorder.events("done"), {"all_reduce(bucket 7)", "all_reduce"});
}

TEST(CallLabel, TextsMadeAtRunTimeAreKeptOnce) {
  const std::string name = "layers.3.weight";
  const char* kept = interned(name);
  EXPECT_STREQ(kept, "layers.3.weight");
  EXPECT_EQ(kept, interned("layers." + std::to_string(3) + ".weight"));
  EXPECT_NE(kept, interned("layers.4.weight"));
}

/// Its ranks have to be told by the store who is missing.
class Silent : public FakeBackend {
 public:
  using FakeBackend::FakeBackend;
  BackendTraits traits() const override { return {.names_missing_ranks = false}; }
};

TEST(CallLabel, IsPartOfFailures) {
  const auto backend = c10::make_intrusive<Silent>(0, 2);
  const auto group = detail::wrap_backends({{c10::kCPU, backend}}, {.store = c10::make_intrusive<c10d::HashStore>(),
                                                                    .rank = 0,
                                                                    .size = 2,
                                                                    .name = "two",
                                                                    .global_ranks = {0, 1},
                                                                    .timeout = std::chrono::seconds(1)});
  backend->fail_call(0, "the cable was pulled");
  const LabelScope label({"DDP bucket", 3});
  expect_error([&] { all_reduce(at::ones({5}), group); },
               {"rank 0", "all_reduce(sum, Float[5]) #0 of DDP bucket 3", "rank 1 is gone", "the cable was pulled"});
}

}  // namespace
}  // namespace lockstep
