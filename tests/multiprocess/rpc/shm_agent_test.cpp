// Workers of the shared-memory agent that are processes: what they say to each other, and what is left of one that is
// killed.
#include "lockstep/rpc/shm_agent.h"

#include <signal.h>
#include <unistd.h>

#include <thread>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "lockstep/lockstep.h"
#include "lockstep/testing/gtest.h"
#include "tests/support/rpc_workers.h"

namespace lockstep::rpc::shm_agent_process_test {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Clock = std::chrono::steady_clock;

/// Survivors end with this once they saw what they should see.
constexpr int kSawIt = 42;

std::shared_ptr<ShmAgent> start_agent(const World& world, std::map<std::string, TextCallback::Function> functions = {},
                                      const std::string& prefix = "rpc") {
  const auto agent =
      make_shm_agent(c10::make_intrusive<c10d::PrefixStore>(prefix, world.store()), "w" + std::to_string(world.rank()),
                     world.rank(), world.world_size(), {}, std::make_unique<TextCallback>(std::move(functions)));
  agent->start();
  return agent;
}

FuturePtr send_to(ShmAgent& agent, int to, const std::string& text, std::vector<at::Tensor> tensors = {},
                  float timeout = 60) {
  return agent.send(agent.getWorkerInfo(static_cast<torch::distributed::rpc::worker_id_t>(to)),
                    text_message(text, std::move(tensors)), timeout);
}

TEST(ShmAgentProcesses, CallEachOtherWithMessagesOfAnySize) {
  testing::run_processes_in_gtest({.world_size = 3, .timeout = 60s}, [](const World& world) {
    // Twice: after a shutdown workers can meet again.
    for (const char* prefix : {"first", "second"}) {
      const auto agent = start_agent(world, {}, prefix);
      for (const int64_t floats : {1, 512, 8'000, 8'200, 300'000, 20'000'000}) {
        std::vector<std::pair<at::Tensor, FuturePtr>> calls;
        for (int i = 0; i < (floats > 1'000'000 ? 2 : 20); ++i) {
          const auto tensor = at::full({floats}, world.rank() + i);
          calls.emplace_back(tensor, send_to(*agent, (world.rank() + 1 + i % 2) % 3, "echo", {tensor}));
        }
        for (const auto& [tensor, future] : calls) {
          agent->wait(*future);
          EXPECT_TRUE(message_in(future)->tensors()[0].equal(tensor)) << floats;
        }
      }
      agent->join(true, 30);
      agent->shutdown();
    }
  });
}

// RPC-33
TEST(ShmAgentProcesses, TellTheOthersAtOnceThatOneIsGone) {
  const auto report = testing::run_processes_from_gtest(
      {.world_size = 3, .timeout = 60s, .expected_exit_code = kSawIt}, [](const World& world) {
        std::map<std::string, TextCallback::Function> functions;
        functions["die"] = [](Message&) -> FuturePtr {
          ::kill(::getpid(), SIGKILL);
          return nullptr;
        };
        functions["hang"] = [](Message&) { return new_answer(); };  // answers never
        const auto agent = start_agent(world, functions);
        // A large one among them: its block comes back.
        std::vector<FuturePtr> calls;
        if (world.rank() != 2) {
          for (int i = 0; i < 10; ++i) calls.push_back(send_to(*agent, 2, "hang", {at::ones({100 << (i * 2)})}, 0));
        }
        agent->sync();
        if (world.rank() == 2) {
          std::this_thread::sleep_for(60s);
          std::_Exit(0);
        }
        const auto begin = Clock::now();
        if (world.rank() == 0) calls.push_back(send_to(*agent, 2, "die", {}, 0));
        for (const auto& call : calls) {
          EXPECT_THAT(error_in(call), HasSubstr("[lockstep/rpc] worker 'w2' (id 2) is gone"));
        }
        EXPECT_LT(Clock::now() - begin, 5s);
        EXPECT_THAT(error_in(send_to(*agent, 2, "echo")), HasSubstr("worker 'w2' (id 2) is gone"));
        EXPECT_EQ(text_of(*message_in(send_to(*agent, 1 - world.rank(), "echo on"))), "echo on");
        try {
          agent->join(true, 30);
          ADD_FAILURE() << "joined one that is gone";
        } catch (const c10::DistBackendError& error) {
          EXPECT_THAT(error.what(), HasSubstr("worker 'w2' (id 2) is gone"));
        }
        // Not before the other has seen all this.
        EXPECT_EQ(text_of(*message_in(send_to(*agent, 1 - world.rank(), "echo still"))), "echo still");
        world.store()->add("seen", 1);
        const auto end = Clock::now() + 20s;
        while (world.store()->add("seen", 0) < 2 && Clock::now() < end) std::this_thread::sleep_for(5ms);
        agent->shutdown();
        EXPECT_LT(Clock::now() - begin, 25s);
        if (!::testing::Test::HasFailure()) std::_Exit(kSawIt);
      });
  if (testing::is_rank_process()) return;
  for (const std::size_t rank : {0, 1}) {
    EXPECT_EQ(report.ranks[rank].kind, testing::RankOutcome::Kind::kPassed) << report.describe();
  }
}

// RPC-35
TEST(ShmAgentProcesses, MayEndWithoutShutdown) {
  testing::run_processes_in_gtest({.world_size = 2, .timeout = 60s}, [](const World& world) {
    static auto agent = start_agent(world);  // until the very end
    EXPECT_EQ(text_of(*message_in(send_to(*agent, 1 - world.rank(), "echo"))), "echo");
    agent->sync();
  });
}

}  // namespace
}  // namespace lockstep::rpc::shm_agent_process_test
