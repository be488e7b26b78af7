// Workers that freeze, and callers that send more than others take.
#include <signal.h>
#include <unistd.h>

#include "lockstep/base/str.h"
#include "lockstep/comm/barrier.h"
#include "lockstep/rpc/call.h"
#include "lockstep/rpc/rpc.h"
#include "lockstep/testing/gtest.h"

namespace lockstep::rpc_watch_test {

using namespace std::chrono_literals;

const auto own_pid = rpc::function("watch_test.pid", [] { return static_cast<std::int64_t>(::getpid()); });
const auto swallow = rpc::function("watch_test.swallow", [](at::Tensor data) {
  std::this_thread::sleep_for(2ms);
  return data.numel();
});

// RPC-77
TEST(RpcWatch, TellsOfAFrozenWorkerInTime) {
  testing::run_processes_in_gtest({.world_size = 3, .backend = "gloo"}, [](const World& world) {
    std::mutex mutex;
    std::condition_variable told;
    std::vector<std::string> silent;
    rpc::RpcOptions options{.heartbeat = 400ms};
    options.on_silent_worker = [&](const std::string& worker) {
      const std::lock_guard lock(mutex);
      silent.push_back(worker);
      told.notify_all();
    };
    rpc::init_rpc(str("worker", world.rank()), world.rank(), world.world_size(), options);
    if (world.rank() == 0) {
      const auto pid = static_cast<pid_t>(rpc::rpc_sync("worker2", own_pid));
      EXPECT_TRUE(rpc::silent_workers().empty());
      ::kill(pid, SIGSTOP);
      {
        std::unique_lock lock(mutex);
        EXPECT_TRUE(told.wait_for(lock, 20s, [&] { return !silent.empty(); }));
        EXPECT_EQ(silent, std::vector<std::string>{"worker2"});
      }
      EXPECT_EQ(rpc::silent_workers(), std::vector<std::string>{"worker2"});
      // Once, however long it is silent.
      std::this_thread::sleep_for(1200ms);
      {
        const std::lock_guard lock(mutex);
        EXPECT_EQ(silent.size(), 1);
      }
      ::kill(pid, SIGCONT);
      for (int i = 0; i < 2000 && !rpc::silent_workers().empty(); ++i) std::this_thread::sleep_for(5ms);
      EXPECT_TRUE(rpc::silent_workers().empty()) << "it is there again";
    }
    barrier(world.group());
    rpc::shutdown();
  });
}

// RPC-77
TEST(RpcWatch, BoundsBytesOnTheirWayToAWorker) {
  testing::run_processes_in_gtest({.world_size = 2, .backend = "gloo"}, [](const World& world) {
    constexpr std::size_t kLimit = 4 << 20;
    rpc::init_rpc(str("worker", world.rank()), world.rank(), world.world_size(), {.max_bytes_in_flight = kLimit});
    if (world.rank() == 0) {
      const auto megabyte = at::ones({1 << 20}, at::kByte);
      std::vector<rpc::Future<std::int64_t>> futures;
      for (int i = 0; i < 40; ++i) futures.push_back(rpc::rpc_async("worker1", swallow, megabyte));
      // Larger than the limit: alone, but not never.
      futures.push_back(rpc::rpc_async("worker1", swallow, at::ones({6 << 20}, at::kByte)));
      EXPECT_EQ(rpc::wait_all(futures).back(), 6 << 20);
      const auto peak = std::stoul(rpc::debug_info().at("peak_bytes_in_flight"));
      EXPECT_GE(peak, 6U << 20);
      EXPECT_LT(peak, (6U << 20) + (1U << 20));
    }
    rpc::shutdown();
  });
}

}  // namespace lockstep::rpc_watch_test
