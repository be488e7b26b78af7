// Suites whose tests share RPC workers: processes that are started once and initialise RPC once.
#pragma once

#include <chrono>
#include <functional>
#include <string>

#include "lockstep/base/str.h"
#include "lockstep/rpc/rpc.h"
#include "lockstep/testing/gtest.h"

namespace lockstep::rpc {

/// Waits until `is_so` holds, 20 s at most. True if it does.
template <class Condition>
bool eventually(const Condition& is_so) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!is_so()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return true;
}

/// Derive with the suite's own type, as of ContinuousTest. Workers are worker0, worker1, …; references that a test
/// leaves behind fail its suite's last test, which should call end().
template <class Suite, int kWorkers = 4>
class RpcSuite : public testing::ContinuousTest<Suite> {
 public:
  static testing::RunOptions options() { return {.world_size = kWorkers, .backend = "gloo"}; }

 protected:
  /// `body` on every worker, and a barrier.
  void everywhere(const std::function<void(int rank)>& body) {
    this->run([&](const World& world) {
      if (!is_initialised()) {
        init_rpc(str("worker", world.rank()), world.rank(), world.world_size(), {.fail_on_rref_leak = true});
      }
      body(world.rank());
      barrier();
    });
  }

  /// `body` on worker0, while the others serve.
  void lead(const std::function<void()>& body) {
    everywhere([&](int rank) {
      if (rank == 0) body();
    });
  }

  void end() {
    this->run([&](const World& world) {
      if (!is_initialised()) init_rpc(str("worker", world.rank()), world.rank(), world.world_size());
      shutdown();
      EXPECT_FALSE(is_initialised());
    });
  }
};

}  // namespace lockstep::rpc
