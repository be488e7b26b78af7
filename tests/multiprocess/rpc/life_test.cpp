// How RPC begins and ends.
#include <torch/csrc/distributed/rpc/rref_context.h>

#include <unistd.h>

#include <array>
#include <cstdio>

#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/group.h"
#include "lockstep/comm/world.h"
#include "lockstep/rpc/box.h"
#include "lockstep/rpc/call.h"
#include "lockstep/rpc/dist_autograd.h"
#include "lockstep/rpc/distributed_optimizer.h"
#include "lockstep/rpc/remote_module.h"
#include "lockstep/testing/temp_dir.h"
#include "tests/support/rpc_suite.h"

namespace lockstep::rpc_life_test {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using rpc::init_rpc;
using rpc::rpc_async;
using rpc::rpc_sync;
using rpc::RpcOptions;
using rpc::shutdown;
using testing::expect_error;

const auto add = rpc::function("life.add", [](at::Tensor a, at::Tensor b) { return a + b; });
struct ScaleImpl : torch::nn::Module {
  explicit ScaleImpl(std::int64_t size) : weight(register_parameter("weight", at::ones(size))) {}
  at::Tensor forward(at::Tensor x) { return x * weight; }
  at::Tensor weight;
};
const auto scale_class = rpc::module_class<ScaleImpl>("life.Scale").constructor<std::int64_t>();

void run(int world_size, const testing::RankBody& body) {
  testing::run_processes_in_gtest({.world_size = world_size, .backend = "gloo"}, body);
}
std::string name(const World& world) {
  return str("worker", world.rank());
}
void init(const World& world, const RpcOptions& options = {}) {
  init_rpc(name(world), world.rank(), world.world_size(), options);
}
void expect_calls_work(const World& world) {
  const auto x = at::ones(2);
  for (int to = 0; to < world.world_size(); ++to) EXPECT_TRUE(at::equal(rpc_sync(to, add, x, x), x + x));
}

// RPC-1
TEST(RpcLife, HasPythonsDefaults) {
  const RpcOptions options;
  EXPECT_EQ(options.num_worker_threads, 16);
  EXPECT_EQ(options.rpc_timeout, 60s);
  EXPECT_EQ(options.init_method, "env://");
  EXPECT_EQ(options.transports, std::nullopt);
  EXPECT_EQ(options.channels, std::nullopt);
  EXPECT_TRUE(options.device_maps.empty());
  EXPECT_FALSE(options.fail_on_rref_leak);
}

// RPC-1, RPC-4, RPC-5
TEST(RpcLife, MeetsAtAnyStoreAndBeginsAgain) {
  run(2, [&](const World& world) {
    // The job's own store, by the launcher's variables.
    init(world);
    EXPECT_EQ(rpc::worker_info().id_, world.rank());
    expect_calls_work(world);
    expect_error([&] { init(world); }, {"initialised already", name(world), "shutdown()"});
    shutdown();
    // A store that a group uses too, and a group made while RPC runs.
    const auto before = new_group({0, 1});
    init(world, {.store = world.store()});
    const auto after = new_group({0, 1});
    for (const auto& group : {before, after}) {
      auto tensor = at::ones(1);
      all_reduce(tensor, group);
      EXPECT_EQ(tensor.item<float>(), 2);
      expect_calls_work(world);
    }
    shutdown();
    const testing::TempDir folder;
    if (world.rank() == 0) world.store()->set("folder", folder.path());
    const auto bytes = world.store()->get("folder");
    const auto path = std::string(bytes.begin(), bytes.end()) + "/store";
    init(world, {.init_method = "file://" + path});
    expect_calls_work(world);
    shutdown();
    const auto own = c10::make_intrusive<c10d::FileStore>(path + ".second", 2);
    init(world, {.store = own});
    EXPECT_GT(own->getNumKeys(), 0);
    expect_calls_work(world);
    shutdown();
    // Its own default limit.
    init(world, {.rpc_timeout = 100ms});
    EXPECT_EQ(rpc::rpc_timeout(), 100ms);
    rpc::set_rpc_timeout(60s);
    shutdown();
    // As somebody else the contexts' ids would be another worker's.
    expect_error([&] { init_rpc(name(world), 1 - world.rank(), 2, {.store = world.store()}); },
                 {str("was rank ", world.rank()), str("cannot be rank ", 1 - world.rank())});
  });
}

// RPC-5
TEST(RpcLife, WorksAlone) {
  run(1, [](const World& world) {
    for (int i = 0; i < 2; ++i) {
      init(world);
      expect_calls_work(world);
      EXPECT_TRUE(at::equal(rpc::remote("worker0", add, at::ones(1), at::ones(1)).to_here(), at::full({1}, 2.0)));
      const dist_autograd::Context context;
      auto x = at::ones(1).requires_grad_();
      dist_autograd::backward(context.id(), {rpc_sync("worker0", add, x, x).sum()});
      EXPECT_EQ(dist_autograd::get_gradients(context.id()).at(x).item<float>(), 2);
      shutdown();
    }
  });
}

// RPC-2
TEST(RpcLife, BeginsWhenAllAreThere) {
  run(3, [](const World& world) {
    const auto begin = Clock::now();
    if (world.rank() == 2) std::this_thread::sleep_for(500ms);
    init(world);
    if (world.rank() != 2) {
      EXPECT_GE(Clock::now() - begin, 400ms);
    }
    // The first call needs no patience.
    EXPECT_TRUE(
        at::equal(rpc_sync(rpc::Callee("worker2").within(5s), add, at::ones(1), at::ones(1)), at::full({1}, 2.0)));
    const dist_autograd::Context context;
    EXPECT_EQ(context.id() >> 48, world.rank());
    rpc::barrier();
    shutdown();
  });
}

// RPC-3
TEST(RpcLife, RefusesWhatCannotBeByName) {
  const auto refuses = [](const std::vector<std::string>& words, const std::string& worker, int rank, int size,
                          const RpcOptions& options = {}) {
    expect_error([&] { init_rpc(worker, rank, size, options); }, words);
  };
  refuses({"name is empty"}, "", 0, 1);
  for (const auto* const bad : {"a b", "a/b", "a.b", "ä", "a,b"}) refuses({str("name '", bad, "'")}, bad, 0, 1);
  refuses({"128 characters", "127"}, std::string(128, 'x'), 0, 1);
  refuses({"rank is -1"}, "w", -1, 1);
  refuses({"rank is 2", "world_size 2"}, "w", 2, 2);
  refuses({"world_size is 0"}, "w", 0, 0);
  refuses({"rank is 32768", "32767"}, "w", 32768, 40000);
  refuses({"num_worker_threads is 0"}, "w", 0, 1, {.num_worker_threads = 0});
  refuses({"num_worker_threads is -3"}, "w", 0, 1, {.num_worker_threads = -3});
  refuses({"rpc_timeout is -1"}, "w", 0, 1, {.rpc_timeout = -1s});
  refuses({"transport", "carrier_pigeon"}, "w", 0, 1, {.transports = {{"carrier_pigeon"}}});
  refuses({"channel", "english"}, "w", 0, 1, {.channels = {{"english"}}});
  EXPECT_FALSE(rpc::is_initialised());
}

// RPC-3, RPC-76
TEST(RpcLife, RefusesNamesAndFunctionsThatDoNotFitOnEveryWorker) {
  run(3, [](const World& world) {
    expect_error([&] { init_rpc(world.rank() == 0 ? "first" : "second", world.rank(), 3); },
                 {"name 'second' is used by ranks 1, 2"});
    EXPECT_FALSE(rpc::is_initialised());
    if (world.rank() == 2) {
      rpc::function("life.differs", [](at::Tensor x) { return x; });
    } else {
      rpc::function("life.differs", [](std::int64_t x) { return x; });
    }
    expect_error([&] { init(world); },
                 {"function 'life.differs'", "(int) -> int", "'worker0'", "(Tensor) -> Tensor", "'worker2'"});
    EXPECT_FALSE(rpc::is_initialised());
  });
}

void expect_refused_everywhere() {
  const auto refuses = [](const std::function<void()>& action) { expect_error(action, {"RPC is not initialised"}); };
  const auto x = at::ones(1);
  refuses([&] { rpc_sync("worker0", add, x, x); });
  refuses([&] { rpc_async("worker0", add, x, x); });
  refuses([&] { rpc::remote("worker0", add, x, x); });
  refuses([&] { const rpc::RRef<at::Tensor> ref(x); });
  refuses([&] { const rpc::RemoteModule<ScaleImpl> module("worker0", std::int64_t{2}); });
  refuses([&] { const dist_autograd::Context context; });
  refuses([&] { dist_autograd::get_gradients(0); });
  refuses([&] { dist_autograd::backward(0, {x}); });
  refuses([] { rpc::worker_info(); });
  refuses([] { rpc::worker_info("worker0"); });
  refuses([] { rpc::worker_infos(); });
  refuses([] { rpc::barrier(); });
  refuses([] { rpc::all_gather(""); });
  refuses([] { rpc::rpc_timeout(); });
  refuses([] { rpc::set_rpc_timeout(1s); });
  refuses([] { rpc::debug_info(); });
  refuses([] { rpc::silent_workers(); });
  refuses([] { shutdown(); });
}

// RPC-6, RPC-29
TEST(RpcLife, RefusesUseBeforeAndAfter) {
  run(2, [](const World& world) {
    expect_refused_everywhere();
    init(world);
    auto there = rpc::remote(1 - world.rank(), add, at::ones(1), at::ones(1));
    auto module = std::make_shared<rpc::RemoteModule<ScaleImpl>>(str("rank:", 1 - world.rank()), std::int64_t{2});
    module->forward(at::ones(2));
    shutdown();
    expect_refused_everywhere();
    expect_error([&] { there.to_here(); }, {"RPC is not initialised"});
    expect_error([&] { rpc::Wire<rpc::RRef<at::Tensor>>::to(there); }, {"RPC is not initialised"});
    expect_error([&] { module->forward(at::ones(2)); }, {"RPC is not initialised"});
  });
}

std::atomic<bool> has_slept = false;
const auto sleep_well = rpc::function("life.sleep_well", [](std::int64_t ms) {
  std::this_thread::sleep_for(1ms * ms);
  has_slept = true;
});

// RPC-7
TEST(RpcLife, EndsWhenAllWorkIsDone) {
  run(3, [](const World& world) {
    init(world);
    // Nobody waits for this call but the end itself.
    rpc::Future<void> call;
    if (world.rank() == 0) call = rpc_async("worker1", sleep_well, 600);
    shutdown();
    if (world.rank() == 0) {
      EXPECT_TRUE(call.done());
      call.wait();
    }
    if (world.rank() == 1) {
      EXPECT_TRUE(has_slept);
    }
  });
}

// RPC-7
TEST(RpcLife, WaitsForWorkersLongerThanCallsMayTake) {
  run(2, [](const World& world) {
    init(world, {.rpc_timeout = 300ms});
    // The one serves while the other works on.
    if (world.rank() == 1) {
      for (int i = 0; i < 12; ++i) {
        EXPECT_TRUE(at::equal(rpc_sync("worker0", add, at::ones(1), at::ones(1)), at::full({1}, 2.0)));
        std::this_thread::sleep_for(100ms);
      }
    }
    shutdown();
  });
}

// RPC-7, RPC-33
TEST(RpcLife, TellsOfWorkersThatLeftWithoutIt) {
  run(2, [](const World& world) {
    init(world);
    if (world.rank() == 1) {
      shutdown(/*graceful=*/false);
    } else {
      const auto begin = Clock::now();
      expect_error([] { shutdown(); }, {"worker 'worker1'", "without shutdown()"});
      EXPECT_LT(Clock::now() - begin, 20s);
      EXPECT_FALSE(rpc::is_initialised());
    }
  });
}

// RPC-7
TEST(RpcLife, EndsAfterItsTimeLimitAllTheSame) {
  run(2, [](const World& world) {
    init(world);
    if (world.rank() == 0) {
      const auto begin = Clock::now();
      expect_error([] { shutdown(true, 10ms); }, {"worker1", "did not come"});
      EXPECT_LT(Clock::now() - begin, 15s);
      EXPECT_FALSE(rpc::is_initialised());
      world.store()->set("gave up", "yes");
    } else {
      world.store()->wait({"gave up"});
      expect_error([] { shutdown(true, 3s); }, {"worker"});
      EXPECT_FALSE(rpc::is_initialised());
    }
  });
}

// RPC-7
TEST(RpcLife, EndsAloneAndAtOnceIfAsked) {
  run(2, [](const World& world) {
    init(world);
    if (world.rank() == 1) {
      const auto begin = Clock::now();
      shutdown(/*graceful=*/false);
      EXPECT_LT(Clock::now() - begin, 10s);
      EXPECT_FALSE(rpc::is_initialised());
      world.store()->set("gone", "yes");
    } else {
      world.store()->wait({"gone"});
      expect_error([] { rpc_sync(rpc::Callee("worker1").within(5s), add, at::ones(1), at::ones(1)); }, {"worker1"});
      shutdown(false);
    }
  });
}

// RPC-7, RPC-29
TEST(RpcLife, LetsGoOfObjectsThatOthersStillReferTo) {
  run(2, [](const World& world) {
    rpc::RRef<at::Tensor> kept;
    std::optional<rpc::RemoteModule<ScaleImpl>> module;
    init(world, {.fail_on_rref_leak = true});
    if (world.rank() == 0) {
      kept = rpc::remote("worker1", add, at::ones(1), at::ones(1));
      kept.to_here();
      module.emplace("worker1", std::int64_t{2});
      module->forward(at::ones(2));
    }
    shutdown();
    EXPECT_TRUE(rpc::detail::living_boxes().empty());
    // They are of the life before: told at once, and not after a time limit.
    init(world);
    if (world.rank() == 0) {
      const auto begin = Clock::now();
      expect_error([&] { kept.to_here(); }, {"before the last shutdown()", "Make it anew"});
      expect_error([&] { module->forward(at::ones(2)); }, {"before the last shutdown()"});
      expect_error([&] { rpc_sync("worker1", rpc::Function<void(rpc::RRef<at::Tensor>)>("any"), kept); },
                   {"before the last shutdown()"});
      EXPECT_LT(Clock::now() - begin, 5s);
    }
    rpc::barrier();
    shutdown();
  });
}

// RPC-10, RPC-4
TEST(RpcLife, GathersAnewAfterOneWasMissed) {
  run(2, [](const World& world) {
    init(world);
    if (world.rank() == 0) expect_error([] { rpc::barrier({}, 50ms); }, {"did not come"});
    world.store()->set(str("done", world.rank()), "yes");
    world.store()->wait({"done0", "done1"});
    shutdown(/*graceful=*/false);
    init(world);
    expect_calls_work(world);
    shutdown();
  });
}

// RPC-8, RPC-7
TEST(RpcLife, TellsOfReferencesThatAreLeftIfAsked) {
  run(2, [](const World& world) {
    for (const bool is_strict : {false, true}) {
      init(world, {.fail_on_rref_leak = is_strict});
      rpc::RRef<at::Tensor> own(at::ones(3));
      if (world.rank() == 0) {
        // A reference of somebody who will never give it back.
        auto& context = torch::distributed::rpc::RRefContext::getInstance();
        context.addForkOfOwner(static_cast<const torch::distributed::rpc::RRef&>(*own.impl()).rrefId(),
                               context.genGloballyUniqueId());
      }
      if (is_strict && world.rank() == 0) {
        expect_error([] { shutdown(); }, {"worker 'worker0' still owns", "at::Tensor", "Let RRefs end"});
      } else {
        shutdown();
      }
      EXPECT_FALSE(rpc::is_initialised());
    }
  });
}

/// What a program prints, and its exit status.
std::pair<std::string, int> output_of(const std::string& command) {
  std::string text;
  auto* const pipe = ::popen((command + " 2>&1").c_str(), "r");
  std::array<char, 4096> buffer{};
  while (const auto size = std::fread(buffer.data(), 1, buffer.size(), pipe)) text.append(buffer.data(), size);
  return {text, ::pclose(pipe)};
}

// Run by the next test, as two ranks.
TEST(RpcExit, DISABLED_WithoutShutdown) {
  const auto world = lockstep::init({.backend = "gloo"});
  init_rpc(name(world));  // rank and size from the launcher
  expect_calls_work(world);
  const auto kept = rpc::remote(1 - world.rank(), add, at::ones(1), at::ones(1));
  kept.to_here();
  rpc::barrier();
}

// RPC-35
TEST(RpcExit, WarnsOnceIfThereWasNoShutdown) {
  const auto self = str("/proc/", ::getpid(), "/exe");
  const auto [text, status] =
      output_of(str(LOCKSTEP_RUN_PATH, " -n 2 --timeout 60s ", self,
                    " --gtest_also_run_disabled_tests --gtest_filter=RpcExit.DISABLED_WithoutShutdown"));
  EXPECT_EQ(status, 0) << text;
  const std::string warning = "the process ends without shutdown()";
  std::size_t count = 0;
  for (auto at = text.find(warning); at != std::string::npos; at = text.find(warning, at + 1)) ++count;
  EXPECT_EQ(count, 2) << "one for each\n" << text;
}

}  // namespace lockstep::rpc_life_test
