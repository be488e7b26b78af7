// init() without anybody else: alone, and what it refuses before it contacts anyone.
#include "lockstep/comm/world.h"

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "lockstep/comm/backend_registry.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/fake/fake_backend.h"
#include "lockstep/comm/group_state.h"
#include "lockstep/lockstep.h"
#include "lockstep/testing/checks.h"

namespace lockstep {
namespace {

using testing::expect_error;

TEST(World, RunsAloneWithoutALauncher) {
  const auto world = init();
  EXPECT_EQ(world.rank(), 0);
  EXPECT_EQ(world.world_size(), 1);
  EXPECT_EQ(world.local_world_size(), 1);
  EXPECT_EQ(world.launcher(), "none");
  EXPECT_EQ(world.restart_count(), 0);
  EXPECT_EQ(world.group()->getSize(), 1);
  EXPECT_EQ(group_name(world.group()), "world");
  EXPECT_TRUE(backend_spec(world.group()).starts_with("cpu:shm")) << backend_spec(world.group());
  world.store()->set("key", std::string("value"));
  EXPECT_EQ(world.store()->get_to_str("key"), "value");
}

TEST(World, MakesCollectivesOfOneRankLocal) {
  const auto world = init();
  auto tensor = at::arange(3, at::kFloat);
  all_reduce(tensor, world.group(), ReduceOp::AVG);
  testing::check_equal("average of one", tensor, at::arange(3, at::kFloat));
  auto pending = launch_all_reduce(tensor, world.group());
  EXPECT_TRUE(pending.is_completed());
  EXPECT_EQ(pending.future()->value().toTensorVector().at(0).data_ptr(), tensor.data_ptr());
  auto gathered = at::zeros({3});
  all_gather_into_tensor(gathered, tensor, world.group());
  testing::check_equal("gathered", gathered, tensor);
  barrier(world.group());
  EXPECT_EQ(all_gather_object("me", world.group()), std::vector<std::string>{"me"});
  EXPECT_EQ(broadcast_object("me", 0, world.group()), "me");
  check_same_on_all_ranks("anything", "x", world.group());
}

TEST(World, EndsWithItsLastCopy) {
  {
    const auto world = init();
    const auto copy = world;
    expect_error([] { static_cast<void>(init()); }, {"init was called twice"});
    EXPECT_EQ(default_group().get(), copy.group().get());
  }
  EXPECT_FALSE(current_world().has_value());
  expect_error([] { default_group(); }, {"call lockstep::init() first"});
  const auto again = init();
  EXPECT_TRUE(current_world().has_value());
}

TEST(World, RefusesContradictoryOptionsBeforeContactingAnyone) {
  const auto refuse = [](const InitOptions& options, const std::vector<std::string>& words) {
    expect_error([&] { static_cast<void>(init(options)); }, words);
  };
  refuse({.rank = 0}, {"both rank and world_size"});
  refuse({.world_size = 2}, {"both rank and world_size"});
  refuse({.rank = 2, .world_size = 2}, {"rank 2", "world_size 2"});
  refuse({.init_method = "tcp://127.0.0.1:1"}, {"tcp://127.0.0.1:1", "set rank and world_size"});
  refuse({.store = c10::make_intrusive<c10d::HashStore>()}, {"a store", "set rank and world_size"});
  refuse({.backend = "glue"}, {"no backend 'glue'", "gloo", "threads"});
  refuse({.backend = "cpu:gloo,cpu:threads"}, {"two backends for cpu", "gloo", "threads"});
  refuse({.timeout = std::chrono::milliseconds(0)}, {"timeout must be positive"});
  refuse({.init_method = "carrier://pigeon", .rank = 0, .world_size = 2},
         {"carrier://pigeon", "env://", "file:///path"});
  refuse({.init_method = "tcp://nohost", .rank = 0, .world_size = 2}, {"tcp://nohost", "host:port"});
  refuse({.init_method = "tcp://h:x", .rank = 0, .world_size = 2}, {"no valid port"});
  refuse({.rank = 0, .world_size = 2}, {"MASTER_ADDR"});
}

TEST(World, NamesTheRanksThatDoNotCome) {
  expect_error(
      [] {
        static_cast<void>(init({.timeout = std::chrono::milliseconds(300),
                                .rank = 1,
                                .world_size = 3,
                                .store = c10::make_intrusive<c10d::HashStore>()}));
      },
      {"rank 1", "rank 0, 2 did not come within 300 ms"});
}

// U-10: nothing but the sentence, and in time
TEST(World, SaysWhereItLookedForTheStore) {
  ::testing::internal::CaptureStderr();
  const auto start = std::chrono::steady_clock::now();
  expect_error(
      [] {
        static_cast<void>(init({.timeout = std::chrono::milliseconds(1000),
                                .init_method = "tcp://127.0.0.1:1",
                                .rank = 1,
                                .world_size = 2}));
      },
      {"rank 1 of 2", "127.0.0.1:1", "Connection refused", "Is rank 0 running"});
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(2000));
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
}

TEST(BackendRegistry, TakesNewBackends) {
  register_backend("pretend", {c10::kCPU}, [](const BackendRequest& request) -> BackendPtr {
    return c10::make_intrusive<FakeBackend>(request.rank, request.size, request.timeout);
  });
  const auto store = c10::make_intrusive<c10d::HashStore>();
  store->set("world/1/check_in/0", std::vector<uint8_t>{1});
  const auto world = init({.backend = "pretend", .rank = 1, .world_size = 2, .store = store});
  EXPECT_EQ(world.group()->getBackend(c10::kCPU)->getBackendName(), "fake");
  expect_error([&] { all_reduce(at::ones({1}, at::kCUDA), world.group()); }, {});
  expect_error([] { parse_backend_spec("cuda:pretend"); }, {"'pretend' cannot serve cuda"});
  expect_error([] { register_backend("a:b", {c10::kCPU}, nullptr); }, {"'a:b' is no backend name"});
}

// c10d itself keeps one backend of a kind it does not know; a group of ours keeps as many as it has devices.
TEST(BackendRegistry, ServesEachDeviceByItsOwnBackend) {
  const auto for_cpu = c10::make_intrusive<FakeBackend>(0, 2);
  const auto for_meta = c10::make_intrusive<FakeBackend>(0, 2);
  const auto group = detail::wrap_backends({{c10::kCPU, for_cpu}, {c10::kMeta, for_meta}},
                                           {.store = c10::make_intrusive<c10d::HashStore>(),
                                            .rank = 0,
                                            .size = 2,
                                            .name = "two",
                                            .global_ranks = {0, 1},
                                            .timeout = std::chrono::seconds(1)});
  all_reduce(at::ones({1}), group);
  all_reduce(at::ones({2}, at::kMeta), group);
  ASSERT_EQ(for_cpu->calls().size(), 1U);
  ASSERT_EQ(for_meta->calls().size(), 1U);
  EXPECT_TRUE(for_meta->calls()[0].inputs[0].is_meta());
  EXPECT_TRUE(serves_device(group, c10::kMeta));
  EXPECT_FALSE(serves_device(group, c10::kCUDA));
}

TEST(BackendRegistry, ParsesPythonsBackendStrings) {
  using Parsed = std::vector<std::pair<c10::DeviceType, std::string>>;
  EXPECT_EQ(parse_backend_spec("gloo"), (Parsed{{c10::kCPU, "gloo"}, {c10::kCUDA, "gloo"}}));
  EXPECT_EQ(parse_backend_spec("cpu:gloo"), (Parsed{{c10::kCPU, "gloo"}}));
  EXPECT_EQ(parse_backend_spec("cuda:gloo,cpu:threads"), (Parsed{{c10::kCPU, "threads"}, {c10::kCUDA, "gloo"}}));
  expect_error([] { parse_backend_spec("quantum:gloo"); }, {});
}

}  // namespace
}  // namespace lockstep
