// Workers that die, and messages that are lost or late.
#include <signal.h>
#include <torch/csrc/distributed/rpc/message.h>
#include <unistd.h>

#include "lockstep/rpc/call.h"
#include "lockstep/rpc/dist_autograd.h"
#include "lockstep/rpc/remote_error.h"
#include "lockstep/rpc/session.h"
#include "lockstep/rpc/switched_agent.h"
#include "tests/support/rpc_suite.h"

namespace lockstep::rpc_failure_test {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using rpc::RemoteError;
using rpc::rpc_async;
using rpc::rpc_sync;
using testing::expect_error;
using torch::distributed::rpc::Message;
using torch::distributed::rpc::MessageType;

/// Survivors end with this once they saw what they should see.
constexpr int kSawIt = 42;

const auto multiply = rpc::function("failure.multiply", [](at::Tensor a, at::Tensor b) { return a * b; });
const auto die = rpc::function("failure.die", [](std::int64_t after_ms) {
  std::this_thread::sleep_for(1ms * after_ms);
  ::kill(::getpid(), SIGKILL);
});
struct DieOnTheWayBack : torch::autograd::Function<DieOnTheWayBack> {
  static at::Tensor forward(torch::autograd::AutogradContext* /*context*/, const at::Tensor& x) { return x * 1; }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* /*context*/,
                                                 const torch::autograd::variable_list& /*grads*/) {
    ::kill(::getpid(), SIGKILL);
    return {};
  }
};
const auto die_in_backward =
    rpc::function("failure.die_in_backward", [](at::Tensor x) { return DieOnTheWayBack::apply(x); });

/// Runs `survive` on workers 0 and 1; worker2 serves, and dies of what they do.
void with_a_victim(const std::function<void(int rank)>& survive) {
  const auto report = testing::run_processes_from_gtest(
      {.world_size = 3, .backend = "gloo", .timeout = 60s, .expected_exit_code = kSawIt}, [&](const World& world) {
        rpc::init_rpc(str("worker", world.rank()), world.rank(), world.world_size());
        if (world.rank() == 2) {
          std::this_thread::sleep_for(60s);
          std::_Exit(0);
        }
        survive(world.rank());
        // The others go on, and a graceful end tells of it in time and ends all the same.
        const auto x = at::ones(2);
        EXPECT_TRUE(at::equal(rpc_sync(1 - world.rank(), multiply, x, x), x));
        rpc::barrier({"worker0", "worker1"});
        const auto begin = Clock::now();
        // Whoever leaves second may hear of the first that has left instead.
        const auto text = testing::expect_error([] { rpc::shutdown(true, 3s); }, {"worker"});
        EXPECT_TRUE(text.find("worker2") != std::string::npos ||
                    text.find(str("worker", 1 - world.rank())) != std::string::npos)
            << text;
        EXPECT_LT(Clock::now() - begin, 20s);
        EXPECT_FALSE(rpc::is_initialised());
        if (!::testing::Test::HasFailure()) std::_Exit(kSawIt);
      });
  if (testing::is_rank_process()) return;
  for (const std::size_t rank : {0, 1}) {
    EXPECT_EQ(report.ranks[rank].kind, testing::RankOutcome::Kind::kPassed) << report.describe();
  }
}

// RPC-33
TEST(RpcDeath, DuringACallIsToldAtOnceByName) {
  with_a_victim([](int rank) {
    const auto begin = Clock::now();
    // Both are in a call; one of them kills.
    const auto call = rank == 0 ? rpc_async("worker2", die, 300) : rpc_async("worker2", die, 60000);
    try {
      call.wait();
      ADD_FAILURE() << "it answered";
    } catch (const RemoteError& error) {
      EXPECT_EQ(error.kind(), RemoteError::Kind::kConnection) << error.what();
      EXPECT_EQ(error.worker(), "worker2");
      EXPECT_EQ(error.function(), "failure.die");
    }
    EXPECT_LT(Clock::now() - begin, 15s) << "of a limit of 60 s";
    expect_error([] { rpc_sync("worker2", multiply, at::ones(1), at::ones(1)); }, {"worker2", "failure.multiply"});
    const auto lost = rpc::remote("worker2", multiply, at::ones(1), at::ones(1));
    expect_error([&] { lost.to_here(); }, {"worker 'worker2'"});
  });
}

// RPC-33
TEST(RpcDeath, DuringABackwardIsToldAtOnce) {
  with_a_victim([](int rank) {
    if (rank == 0) {
      const auto begin = Clock::now();
      const dist_autograd::Context context;
      auto x = at::ones(2).requires_grad_();
      const auto y = rpc_sync("worker1", multiply, x, rpc_sync("worker2", die_in_backward, x * 2));
      expect_error([&] { dist_autograd::backward(context.id(), {y.sum()}); }, {"backward", "worker"});
      EXPECT_LT(Clock::now() - begin, 15s);
    }
    rpc::barrier({"worker0", "worker1"});
    // A backward of the others' own works.
    const dist_autograd::Context context;
    auto x = at::ones(2).requires_grad_();
    dist_autograd::backward(context.id(), {rpc_sync(1 - rank, multiply, x, x).sum()});
    EXPECT_TRUE(at::equal(dist_autograd::get_gradients(context.id()).at(x), 2 * x));
    rpc::barrier({"worker0", "worker1"});
  });
}

// RPC-33
TEST(RpcDeath, BeforeTheEndIsTold) {
  with_a_victim([](int rank) {
    if (rank == 0) expect_error([] { rpc_sync("worker2", die, 0); }, {"worker2"});
    rpc::barrier({"worker0", "worker1"});
  });
}

class RpcLoss : public rpc::RpcSuite<RpcLoss, 2> {};

class Counter {
 public:
  Counter() { ++living; }
  ~Counter() { --living; }
  Counter(const Counter&) = delete;
  Counter& operator=(const Counter&) = delete;
  static inline std::atomic<int> living = 0;
};
const auto counter_class = rpc::class_<Counter>("failure.Counter").constructor<>();
const auto living = rpc::function("failure.living", [] { return static_cast<std::int64_t>(Counter::living); });
const auto contexts =
    rpc::function("failure.contexts", [] { return rpc::debug_info().at("dist_autograd.num_autograd_contexts"); });
const auto counted = rpc::function("failure.counted", [](bool counts) {
  static std::atomic<std::int64_t> calls = 0;
  return counts ? ++calls : calls.load();
});
const auto take = rpc::function("failure.take", [](rpc::RRef<Counter> ref) { return ref.owner_name(); });

/// Loses the first `count` messages of each type that `is_meant`, delays all by `delay`.
void lose(int count, std::chrono::milliseconds delay, const std::function<bool(MessageType)>& is_meant) {
  auto lost = std::make_shared<std::map<MessageType, int>>();
  auto mutex = std::make_shared<std::mutex>();
  rpc::detail::switched_agent()->set_send_hook([=](const auto& /*to*/, const Message& message) {
    if (!is_meant(message.type())) return;
    std::this_thread::sleep_for(delay);
    const std::lock_guard lock(*mutex);
    if ((*lost)[message.type()]++ < count) throw std::runtime_error("lost on purpose");
  });
}
bool is_control(MessageType type) {
  return type == MessageType::RREF_USER_DELETE || type == MessageType::RREF_CHILD_ACCEPT ||
         type == MessageType::RREF_FORK_REQUEST || type == MessageType::CLEANUP_AUTOGRAD_CONTEXT_REQ;
}

// RPC-34, RPC-21
TEST_F(RpcLoss, OfControlMessagesIsMadeUpFor) {
  everywhere([](int rank) {
    lose(3, 20ms, is_control);
    if (rank == 0) {
      {
        const dist_autograd::Context context;
        auto x = at::ones(1).requires_grad_();
        dist_autograd::backward(context.id(), {rpc_sync("worker1", multiply, x, x).sum()});
        const auto there = rpc::remote<Counter>("worker1");
        // A reference that the other worker accepts, one that it forks, and one of this worker's own.
        EXPECT_EQ(rpc_sync("worker1", take, there), "worker1");
        EXPECT_EQ(rpc_sync("worker1", take, rpc::RRef<Counter>(std::make_shared<Counter>())), "worker0");
      }
      EXPECT_TRUE(rpc::eventually([] { return rpc_sync("worker1", contexts) == "0"; }));
      EXPECT_TRUE(rpc::eventually([] { return rpc_sync("worker1", living) == 0; }));
      EXPECT_TRUE(rpc::eventually([] { return rpc_sync("worker0", living) == 0; }));
    }
    rpc::barrier();
    rpc::detail::switched_agent()->set_send_hook(nullptr);
  });
}

// RPC-21
TEST_F(RpcLoss, OfCallsIsToldAndNotMadeUpFor) {
  lead([] {
    const auto before = rpc_sync("worker1", counted, false);
    lose(1, 0ms, [](MessageType type) { return type == MessageType::SCRIPT_CALL; });
    expect_error([] { rpc_sync("worker1", counted, true); }, {"worker1", "failure.counted", "lost on purpose"});
    rpc::detail::switched_agent()->set_send_hook(nullptr);
    std::this_thread::sleep_for(1500ms);  // longer than control messages wait
    EXPECT_EQ(rpc_sync("worker1", counted, false), before);
    EXPECT_EQ(rpc_sync("worker1", counted, true), before + 1);
  });
}

// RPC-8
TEST_F(RpcLoss, EndsWithNothingLeft) {
  end();
}

}  // namespace lockstep::rpc_failure_test
