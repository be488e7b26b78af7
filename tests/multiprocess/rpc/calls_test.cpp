// Calls, references and contexts among three processes.
#include "lockstep/base/str.h"
#include "lockstep/rpc/call.h"
#include "lockstep/rpc/dist_autograd.h"
#include "lockstep/rpc/remote_error.h"
#include "lockstep/rpc/rpc.h"
#include "lockstep/testing/gtest.h"

namespace lockstep::rpc_calls_test {

using namespace std::chrono_literals;
using rpc::RemoteError;
using rpc::rpc_async;
using rpc::rpc_sync;
using testing::expect_error;

struct Batch {
  at::Tensor input;
  std::int64_t step = 0;
  std::vector<std::string> names;
};
auto rpc_fields(Batch& batch) {
  return std::tie(batch.input, batch.step, batch.names);
}

class Counter {
 public:
  explicit Counter(std::int64_t value) : value_(value) { ++living; }
  ~Counter() { --living; }
  Counter(const Counter&) = delete;
  Counter& operator=(const Counter&) = delete;
  std::int64_t add(std::int64_t by) { return value_ += by; }
  std::int64_t value() const { return value_; }

  static inline std::atomic<int> living = 0;

 private:
  std::int64_t value_;
};

const auto add = rpc::function("add", [](at::Tensor a, at::Tensor b) { return a + b; });
const auto fail = rpc::function("fail", [](std::string text) { throw std::runtime_error(text); });
const auto fail_oddly = rpc::function("fail_oddly", [] { throw 42; });
const auto echo_batch = rpc::function("echo_batch", [](Batch batch) {
  batch.step += 1;
  batch.names.emplace_back("seen");
  return batch;
});
const auto slowly =
    rpc::function("slowly", [](std::int64_t ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); });
const auto chain = rpc::function("chain", [](std::vector<std::string> rest, at::Tensor x) -> rpc::Future<at::Tensor> {
  static const rpc::Function<rpc::Future<at::Tensor>(std::vector<std::string>, at::Tensor)> self("chain");
  if (rest.empty()) {
    const rpc::Promise<at::Tensor> promise;
    promise.set_value(x + 1);
    return promise.future();
  }
  const auto next = rest.front();
  rest.erase(rest.begin());
  return rpc_async(next, self, rest, x + 1);
});
const auto counter_class = rpc::class_<Counter>("Counter")
                               .constructor<std::int64_t>()
                               .method("add", &Counter::add)
                               .method("value", &Counter::value);
const auto living_counters =
    rpc::function("living_counters", [] { return static_cast<std::int64_t>(Counter::living); });
const auto value_of =
    rpc::function("value_of", [](rpc::RRef<Counter> counter) { return counter.rpc_sync(&Counter::value); });
const auto multiply = rpc::function("multiply", [](at::Tensor x, at::Tensor w) { return x.mul(w); });

void run(int world_size, const std::function<void(int rank)>& body) {
  testing::run_processes_in_gtest({.world_size = world_size, .backend = "gloo"}, [&](const World& world) {
    rpc::init_rpc(str("worker", world.rank()), world.rank(), world.world_size(), {.fail_on_rref_leak = true});
    body(world.rank());
    rpc::shutdown();
  });
}

TEST(RpcCalls, ReturnWhatFunctionsReturn) {
  run(3, [](int rank) {
    if (rank != 0) return;
    const auto x = at::ones({2, 2});
    EXPECT_TRUE(at::equal(rpc_sync("worker1", add, x, x), x + x));
    EXPECT_TRUE(at::equal(rpc_sync(2, add, x, x), x + x));
    EXPECT_TRUE(at::equal(rpc_sync("worker0", add, x, x), x + x));
    const auto batch = rpc_sync("worker1", echo_batch, Batch{x, 4, {"a"}});
    EXPECT_EQ(batch.step, 5);
    EXPECT_EQ(batch.names, (std::vector<std::string>{"a", "seen"}));
    std::vector<rpc::Future<at::Tensor>> futures;
    for (int i = 0; i < 200; ++i) futures.push_back(rpc_async(1 + i % 2, add, x, at::full({2, 2}, i)));
    for (int i = 0; i < 200; ++i) EXPECT_TRUE(at::equal(futures[i].wait(), x + i));
    EXPECT_TRUE(at::equal(rpc_sync("worker1", chain, std::vector<std::string>{"worker2", "worker0"}, x), x + 3));
    EXPECT_TRUE(at::equal(
        rpc_sync("worker1", rpc::builtin<at::Tensor(at::Tensor, at::Tensor)>("aten::add.Tensor"), x, x), x + x));
  });
}

TEST(RpcCalls, FailWithWorkerFunctionAndText) {
  run(3, [](int rank) {
    if (rank != 0) return;
    expect_error([] { rpc_sync("worker1", fail, "odd weather"); },
                 {"worker 'worker1'", "function 'fail' threw", "odd weather"});
    expect_error([] { rpc_sync("worker1", fail_oddly); },
                 {"worker 'worker1'", "'fail_oddly' threw", "no std::exception"});
    expect_error([] { rpc_sync("worker1", rpc::Function<void()>("missing")); },
                 {"worker1", "'missing'", "not registered"});
    expect_error([] { rpc_sync("worker1", rpc::Function<void(int)>("add"), 1); },
                 {"(Tensor, Tensor) -> Tensor", "1 argument"});
    expect_error([] { rpc_sync("worker1", rpc::Function<void(int, int)>("add"), 1, 2); },
                 {"argument 1", "expected Tensor, got Int"});
    expect_error([] { rpc_sync(rpc::Callee("worker1").within(50ms), slowly, 500); }, {"worker1", "slowly", "50"});
    expect_error([] { rpc_sync("nobody", slowly, 500); }, {"no worker 'nobody'", "'worker2' (rank 2)"});
    rpc_sync("worker1", slowly, 1);
  });
}

TEST(RpcCalls, KeepObjectsBehindReferences) {
  run(3, [](int rank) {
    if (rank != 0) return;
    {
      auto counter = rpc::remote<Counter>("worker1", 10);
      EXPECT_FALSE(counter.is_owner());
      EXPECT_EQ(counter.owner_name(), "worker1");
      counter.rpc_sync(&Counter::add, 2);
      counter.rpc_async(&Counter::add, 5).wait();
      EXPECT_EQ(counter.remote(&Counter::add, 7).to_here(), 24);
      EXPECT_EQ(rpc_sync("worker2", value_of, counter), 24);
      EXPECT_EQ(rpc_sync("worker1", value_of, counter), 24);
      EXPECT_EQ(rpc_sync("worker1", living_counters), 1);
      expect_error([&] { counter.local_value(); }, {"worker 'worker0'", "'worker1' owns"});
      auto broken = rpc::remote("worker1", rpc::Function<at::Tensor(at::Tensor)>("missing"), at::ones(1));
      expect_error([&] { broken.to_here(); }, {"worker1", "missing", "not registered"});
    }
    for (int i = 0; i < 500 && rpc_sync("worker1", living_counters) > 0; ++i) std::this_thread::sleep_for(1ms);
    EXPECT_EQ(rpc_sync("worker1", living_counters), 0);
    const rpc::RRef<at::Tensor> own(at::ones(2));
    EXPECT_TRUE(own.to_here().is_same(own.local_value()));
  });
}

TEST(RpcCalls, RunOneBackwardThroughAllWorkers) {
  run(3, [](int rank) {
    if (rank != 0) return;
    auto x = at::full({2}, 3.0).requires_grad_();
    auto w = at::full({2}, 5.0).requires_grad_();
    const dist_autograd::Context context;
    const auto y = rpc_sync("worker1", multiply, x, w);
    const auto loss = rpc_sync("worker2", multiply, y, y).sum();
    dist_autograd::backward(context.id(), {loss});
    const auto gradients = dist_autograd::get_gradients(context.id());
    EXPECT_EQ(gradients.size(), 2);
    EXPECT_TRUE(at::allclose(gradients.at(x), 2 * x * w * w));
    EXPECT_TRUE(at::allclose(gradients.at(w), 2 * x * x * w));
    EXPECT_FALSE(x.grad().defined());
  });
}

}  // namespace lockstep::rpc_calls_test
