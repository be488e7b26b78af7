// Workers that come and go, over TensorPipe.
#include "lockstep/rpc/call.h"
#include "lockstep/rpc/rpc.h"
#include "tests/support/rpc_suite.h"

namespace lockstep::rpc_dynamic_test {

using namespace std::chrono_literals;
using rpc::rpc_sync;
using testing::expect_error;

const auto own_name = rpc::function("dynamic.own_name", [] { return rpc::worker_info().name_; });

void join(const World& world) {
  rpc::init_rpc(str("worker", world.rank()), world.rank(), std::nullopt);
}
void signal(const World& world, const std::string& what) {
  world.store()->set(what, "yes");
}
std::vector<std::string> members() {
  std::vector<std::string> names;
  for (const auto& info : rpc::worker_infos()) names.push_back(info.name_);
  return names;
}
using Names = std::vector<std::string>;

// RPC-76
TEST(RpcDynamicGroup, WorkersComeAndGo) {
  testing::run_processes_in_gtest({.world_size = 3, .backend = "gloo"}, [](const World& world) {
    auto& store = *world.store();
    if (world.rank() == 0) {
      // Alone at first: nobody is waited for.
      join(world);
      EXPECT_EQ(members(), Names{"worker0"});
      EXPECT_EQ(rpc_sync("worker0", own_name), "worker0");
      expect_error([] { rpc_sync("worker1", own_name); }, {"no worker 'worker1'"});
      signal(world, "first is there");
      store.wait({"second is there"});
      EXPECT_EQ(members(), (Names{"worker0", "worker1"}));
      EXPECT_EQ(rpc_sync("worker1", own_name), "worker1");
      signal(world, "third may come");
      store.wait({"third is there"});
      EXPECT_EQ(members(), (Names{"worker0", "worker1", "worker2"}));
      EXPECT_EQ(rpc_sync("worker2", own_name), "worker2");
      signal(world, "second may go");
      store.wait({"second is gone"});
      EXPECT_EQ(members(), (Names{"worker0", "worker2"}));
      expect_error([] { rpc_sync("worker1", own_name); }, {"no worker 'worker1'", "'worker2'"});
      EXPECT_EQ(rpc_sync("worker2", own_name), "worker2");
    } else if (world.rank() == 1) {
      store.wait({"first is there"});
      join(world);
      EXPECT_EQ(members(), (Names{"worker0", "worker1"}));
      EXPECT_EQ(rpc_sync("worker0", own_name), "worker0");
      signal(world, "second is there");
      store.wait({"second may go"});
      rpc::shutdown();
      signal(world, "second is gone");
      expect_error([&] { join(world); }, {"rank 1 of this group is taken, or was", "another rank"});
    } else {
      store.wait({"third may come"});
      join(world);
      signal(world, "third is there");
      EXPECT_EQ(rpc_sync("worker1", own_name), "worker1");
    }
    store.add("done", 1);
    while (store.add("done", 0) < 3) std::this_thread::sleep_for(5ms);
    if (world.rank() != 1) rpc::shutdown();
    EXPECT_FALSE(rpc::is_initialised());
  });
}

// RPC-76
TEST(RpcDynamicGroup, ComparesFunctionsAndRefusesWhatItCannotDo) {
  testing::run_processes_in_gtest({.world_size = 2, .backend = "gloo"}, [](const World& world) {
    expect_error([&] { rpc::init_rpc("w", world.rank(), std::nullopt, {.agent = rpc::Agent::kShm}); },
                 {"without a world_size needs TensorPipe"});
    if (world.rank() == 0) {
      rpc::function("dynamic.differs", [](at::Tensor x) { return x; });
      join(world);
      signal(world, "there");
      world.store()->wait({"refused"});
      EXPECT_EQ(members(), Names{"worker0"});
      rpc::shutdown();
    } else {
      rpc::function("dynamic.differs", [](std::int64_t x) { return x; });
      world.store()->wait({"there"});
      expect_error([&] { join(world); }, {"function 'dynamic.differs'", "(int) -> int", "(Tensor) -> Tensor"});
      EXPECT_FALSE(rpc::is_initialised());
      signal(world, "refused");
    }
  });
}

}  // namespace lockstep::rpc_dynamic_test
