// References to objects of other workers.
#include "lockstep/rpc/rref.h"

#include <torch/csrc/distributed/rpc/message.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include "lockstep/rpc/call.h"
#include "lockstep/rpc/dist_autograd.h"
#include "lockstep/rpc/session.h"
#include "lockstep/rpc/switched_agent.h"
#include "tests/support/rpc_suite.h"

namespace lockstep::rpc_rref_test {

using namespace std::chrono_literals;
using rpc::rpc_sync;
using rpc::RRef;
using testing::expect_error;
using torch::distributed::rpc::Message;
using torch::distributed::rpc::MessageType;

class RRefs : public rpc::RpcSuite<RRefs> {};

class Named {
 public:
  std::string title() const { return "a " + kind(); }
  virtual ~Named() = default;

 protected:
  virtual std::string kind() const { return "thing"; }
};

class Counter : public Named {
 public:
  explicit Counter(std::int64_t value) : value_(value) { ++living; }
  ~Counter() override { --living; }
  Counter(const Counter&) = delete;
  Counter& operator=(const Counter&) = delete;
  std::int64_t add(std::int64_t by) { return value_ += by; }
  std::int64_t subtract(std::int64_t by) { return value_ -= by; }
  std::int64_t value() const { return value_; }

  static inline std::atomic<int> living = 0;

 protected:
  std::string kind() const override { return "counter"; }

 private:
  std::int64_t value_;
};
using CounterRef = RRef<Counter>;
using TensorRef = RRef<at::Tensor>;

const auto counter_class = rpc::class_<Counter>("rref.Counter")
                               .constructor<std::int64_t>()
                               .method("add", &Counter::add)
                               .method("subtract", &Counter::subtract)
                               .method("title", &Counter::title)
                               .method("value", &Counter::value);
const auto living = rpc::function("rref.living", [] { return static_cast<std::int64_t>(Counter::living); });
const auto add = rpc::function("rref.add", [](at::Tensor a, at::Tensor b) { return a + b; });
const auto value_of = rpc::function("rref.value_of", [](CounterRef ref) { return ref.rpc_sync(&Counter::value); });
const auto slow_counter = rpc::function("rref.slow_counter", [](std::int64_t ms) {
  std::this_thread::sleep_for(1ms * ms);
  return std::make_shared<Counter>(ms);
});
const auto doomed =
    rpc::function("rref.doomed", [](std::string why) -> std::shared_ptr<Counter> { throw std::runtime_error(why); });
const auto slow_and_doomed = rpc::function("rref.slow_and_doomed", [](std::int64_t ms) -> std::shared_ptr<Counter> {
  std::this_thread::sleep_for(1ms * ms);
  throw std::runtime_error("too late");
});
const auto pass_on = rpc::function("rref.pass_on", [](CounterRef ref) { return ref; });
const auto sum_of = rpc::function("rref.sum_of", [](std::map<std::string, std::vector<TensorRef>> refs) {
  auto sum = at::zeros(2);
  for (const auto& [name, all] : refs) {
    for (const auto& each : all) sum = sum + each.to_here();
  }
  return TensorRef(sum);
});
std::mutex kept_mutex;
std::vector<CounterRef> kept_refs;
const auto hold = rpc::function("rref.hold", [](CounterRef ref) {
  const std::lock_guard lock(kept_mutex);
  kept_refs.push_back(std::move(ref));
});
const auto let_go = rpc::function("rref.let_go", [] {
  const std::lock_guard lock(kept_mutex);
  kept_refs.clear();
});

bool no_counters_on(int worker) {
  return rpc::eventually([&] { return rpc_sync(worker, living) == 0; });
}

// RPC-16, RPC-22
TEST_F(RRefs, KnowTheirOwnerAndCallItsMethods) {
  lead([] {
    auto counter = rpc::remote<Counter>("worker1", 10);
    EXPECT_FALSE(counter.is_owner());
    EXPECT_EQ(counter.owner().id_, 1);
    EXPECT_EQ(counter.owner_name(), "worker1");
    EXPECT_EQ(counter.rpc_sync(&Counter::add, 2), 12);
    EXPECT_EQ(counter.rpc_async(&Counter::add, 5).wait(), 17);
    EXPECT_EQ(counter.remote(&Counter::add, 7).to_here(), 24);
    EXPECT_EQ(counter.rpc_sync(&Counter::subtract, 4), 20) << "another method of the same type";
    EXPECT_EQ(counter.rpc_sync(&Counter::title), "a counter") << "a base's method";
    const auto slow = rpc::remote("worker1", slow_counter, 300);
    EXPECT_FALSE(slow.confirmed_by_owner());
    EXPECT_EQ(slow.rpc_sync(&Counter::value), 300);
    expect_error([] { rpc::remote("worker1", slow_counter, 500).within(50ms).rpc_sync(&Counter::value); },
                 {"gave no answer in time", "50 ms"});
    EXPECT_TRUE(rpc::eventually([&] { return counter.confirmed_by_owner(); }));
    EXPECT_EQ(counter.to_string().find("RRef(0, "), 0) << counter;
    EXPECT_NE(counter.to_string(), rpc::remote<Counter>("worker1", 1).to_string());

    const TensorRef own(at::ones(2));
    EXPECT_TRUE(own.is_owner());
    EXPECT_TRUE(own.confirmed_by_owner());
    EXPECT_EQ(own.owner_name(), "worker0");
    // To oneself too.
    const auto self = rpc::remote<Counter>("worker0", 3);
    EXPECT_TRUE(self.is_owner());
    EXPECT_EQ(self.rpc_sync(&Counter::add, 1), 4);
    EXPECT_EQ(self.local_value().value(), 4);
    expect_error([] { CounterRef().owner(); }, {"refers to nothing"});
  });
  lead([] {
    for (const int worker : {0, 1}) EXPECT_TRUE(no_counters_on(worker));
  });
}

// RPC-23, RPC-24
TEST_F(RRefs, GiveTheOwnerTheValueAndOthersACopy) {
  lead([] {
    const TensorRef own(at::ones(2));
    EXPECT_TRUE(own.to_here().is_same(own.local_value()));
    const auto there = rpc::remote("worker2", add, at::ones(2), at::ones(2));
    const auto copy = there.to_here();
    copy.fill_(100);
    EXPECT_TRUE(at::equal(there.to_here(), at::full({2}, 2.0)));
    expect_error([&] { there.local_value(); },
                 {"worker 'worker0'", there.to_string(), "worker 'worker2' owns", "to_here()"});
    const auto counter = rpc::remote<Counter>("worker2", 10);
    expect_error([&] { counter.local_value(); }, {"worker 'worker0'", "'worker2' owns"});
    expect_error([&] { RRef<std::string>(there.impl()).to_here(); }, {"expected str", "Tensor"});
    // It waits until the owner has it.
    EXPECT_EQ(rpc::remote("worker2", slow_counter, 200).rpc_sync(&Counter::value), 200);
  });
}

// RPC-25
TEST_F(RRefs, TravelToOwnersAndThirdWorkers) {
  lead([] {
    const auto counter = rpc::remote<Counter>("worker1", 24);
    for (int worker = 0; worker < 4; ++worker) EXPECT_EQ(rpc_sync(worker, value_of, counter), 24) << worker;
    // As a result: through two workers and back, through its owner, through oneself.
    auto passed = counter;
    for (const int worker : {2, 3, 1, 0}) passed = rpc_sync(worker, pass_on, passed);
    EXPECT_EQ(passed.rpc_sync(&Counter::add, 1), 25);
    EXPECT_EQ(passed.to_string(), counter.to_string());
    // In containers, of several owners; the result is a reference of a fourth.
    const auto x = at::ones(2);
    const auto sum = rpc_sync("worker3", sum_of,
                              std::map<std::string, std::vector<TensorRef>>{
                                  {"remote", {rpc::remote("worker1", add, x, x), rpc::remote("worker2", add, x, x)}},
                                  {"own", {TensorRef(x)}},
                                  {"none", {}}});
    EXPECT_EQ(sum.owner_name(), "worker3");
    EXPECT_TRUE(at::equal(sum.to_here(), 5 * x));
    // A call may name an object that is still being made.
    EXPECT_EQ(rpc_sync("worker2", value_of, rpc::remote("worker1", slow_counter, 200)), 200);
  });
  lead([] { EXPECT_TRUE(no_counters_on(1)); });
}

// RPC-26, RPC-27
TEST_F(RRefs, KeepObjectsUntilTheLastIsGone) {
  lead([] {
    {
      auto counter = rpc::remote<Counter>("worker1", 5);
      for (const int worker : {2, 3}) rpc_sync(worker, hold, counter);
      EXPECT_EQ(rpc_sync("worker1", living), 1);
      // One of several goes: the others go on.
      rpc_sync("worker2", let_go);
      std::this_thread::sleep_for(50ms);
      EXPECT_EQ(counter.rpc_sync(&Counter::add, 1), 6);
    }
    std::this_thread::sleep_for(50ms);
    EXPECT_EQ(rpc_sync("worker1", living), 1) << "worker3 has one";
    rpc_sync("worker3", let_go);
    EXPECT_TRUE(no_counters_on(1));
    // Held by nobody from the start, and many at once.
    for (int i = 0; i < 50; ++i) rpc::remote<Counter>(1 + i % 3, i);
    for (const int worker : {1, 2, 3}) EXPECT_TRUE(no_counters_on(worker));
    // An owner's own, which another keeps.
    {
      const CounterRef own(std::make_shared<Counter>(9));
      rpc_sync("worker2", hold, own);
    }
    EXPECT_EQ(Counter::living, 1);
    rpc_sync("worker2", let_go);
    EXPECT_TRUE(no_counters_on(0));
  });
}

// RPC-28
TEST_F(RRefs, TellAtEveryUseThatTheirCreationFailed) {
  lead([] {
    const auto broken = rpc::remote("worker1", doomed, "bad luck");
    for (int i = 0; i < 2; ++i) {
      expect_error([&] { broken.rpc_sync(&Counter::value); }, {"worker 'worker1'", "'rref.doomed' threw", "bad luck"});
    }
    expect_error([&] { rpc_sync("worker2", value_of, broken); }, {"worker1", "rref.doomed", "bad luck"});
    const auto missing = rpc::remote("worker1", rpc::Function<at::Tensor(at::Tensor)>("missing"), at::ones(1));
    expect_error([&] { missing.to_here(); }, {"worker1", "missing", "not registered"});

    // The request is lost, or takes longer than it may.
    auto& agent = *rpc::detail::switched_agent();
    agent.set_send_hook([](const auto& /*to*/, const Message& message) {
      if (message.type() == MessageType::SCRIPT_REMOTE_CALL) throw std::runtime_error("lost on the way");
    });
    const auto lost = rpc::remote<Counter>("worker1", 3);
    agent.set_send_hook(nullptr);
    expect_error([&] { lost.rpc_sync(&Counter::value); }, {"worker 'worker1'", "creation failed", "lost on the way"});
    expect_error([&] { rpc_sync("worker2", value_of, lost); }, {"worker 'worker1'", "creation failed"});
    // It is not created at all within its time: a thread of the callee's holds no object yet.
    const auto late = rpc::remote(rpc::Callee("worker1").within(50ms), slow_counter, 600);
    std::this_thread::sleep_for(200ms);
    expect_error([&] { late.rpc_sync(&Counter::value); }, {"worker 'worker1'", "creation failed", "50"});
    expect_error([&] { rpc_sync("worker2", value_of, late); }, {"worker 'worker1'", "creation failed"});
    EXPECT_EQ(rpc_sync("worker1", value_of, rpc::remote<Counter>("worker1", 4)), 4);
    std::this_thread::sleep_for(600ms);  // until nothing of it is under way
  });
  lead([] { EXPECT_TRUE(no_counters_on(1)); });
}

// A reference may reach its owner ahead of its object, and even be all that is left of it. RPC-25
TEST_F(RRefs, ReachTheirOwnerBeforeTheirObjectIsThere) {
  lead([] {
    EXPECT_EQ(rpc_sync("worker1", value_of, rpc::remote("worker1", slow_counter, 50)), 50);
    const auto slow = rpc::remote("worker1", slow_counter, 51);
    EXPECT_EQ(rpc_sync("worker2", value_of, rpc_sync("worker1", pass_on, slow)), 51);
    const auto first = rpc_async("worker1", value_of, slow);
    const auto second = rpc_async("worker1", value_of, slow);
    EXPECT_EQ(first.wait() + second.wait(), 102);
    for (int i = 0; i < 200; ++i) {
      EXPECT_EQ(rpc_sync("worker1", value_of, rpc::remote<Counter>("worker1", i)), i);
    }
    expect_error([] { rpc_sync("worker1", value_of, rpc::remote("worker1", slow_and_doomed, 50)); }, {"too late"});
  });
  lead([] { EXPECT_TRUE(no_counters_on(1)); });
}

// RPC-29
TEST_F(RRefs, CannotBeSaved) {
  lead([] {
    const auto there = rpc::remote("worker2", add, at::ones(2), at::ones(2));
    expect_error([&] { torch::jit::pickle_save(rpc::Wire<TensorRef>::to(there)); }, {"only allowed inside RPC calls"});
    const TensorRef own(at::ones(2));
    expect_error([&] { torch::jit::pickle_save(rpc::Wire<TensorRef>::to(own)); }, {"only allowed inside RPC calls"});
  });
}

const auto scaled_sum = rpc::function("rref.scaled_sum", [](at::Tensor x) { return (x * x).sum(); });
const auto a_string = rpc::function("rref.a_string", [] { return std::string("no tensor"); });

// RPC-30
TEST_F(RRefs, StartBackwardsAtTheirOwner) {
  lead([] {
    auto x = at::ones(3).requires_grad_();
    {
      const dist_autograd::Context context;
      const auto loss = rpc::remote("worker1", scaled_sum, x);
      loss.backward(context.id(), /*retain_graph=*/true);
      EXPECT_TRUE(at::equal(dist_autograd::get_gradients(context.id()).at(x), at::full({3}, 2.0)));
      loss.backward(context.id());
      EXPECT_TRUE(at::equal(dist_autograd::get_gradients(context.id()).at(x), at::full({3}, 4.0)));
      expect_error([&] { loss.backward(context.id()); }, {"second time"});
    }
    {
      // Of the owner's own, in a context.
      const dist_autograd::Context context;
      const TensorRef own((x * 3).sum());
      own.backward(context.id());
      EXPECT_TRUE(at::equal(dist_autograd::get_gradients(context.id()).at(x), at::full({3}, 3.0)));
      EXPECT_FALSE(x.grad().defined());
    }
    {
      // Calls that no backward goes through: a context of their own.
      const dist_autograd::Context context;
      const auto loss = rpc::remote("worker1", scaled_sum, x);
      expect_error([&] { loss.backward(); }, {"worker1", "needs the id"});
      expect_error([&] { loss.backward(context.id() + 7); },
                   {"no distributed autograd context", str(context.id() + 7)});
      expect_error([&] { rpc::remote("worker1", add, x, x).backward(context.id()); }, {"3 elements", "scalar"});
      expect_error([&] { rpc::remote("worker1", scaled_sum, at::ones(3)).backward(context.id()); },
                   {"requires no gradient"});
      expect_error([&] { RRef<at::Tensor>(rpc::remote("worker1", a_string).impl()).backward(context.id()); },
                   {"holds a", "string", "not a Tensor"});
    }
    // Without a context an ordinary one.
    const TensorRef own((x * 3).sum());
    own.backward();
    EXPECT_TRUE(at::equal(x.grad(), at::full({3}, 3.0)));
    expect_error([] { TensorRef(at::ones(1)).backward(); }, {"requires no gradient"});
    expect_error([&] { TensorRef(x * 2).backward(); }, {"scalar"});
  });
}

// RPC-8
TEST_F(RRefs, EndWithNothingLeft) {
  end();
}

}  // namespace lockstep::rpc_rref_test
