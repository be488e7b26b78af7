// Calls among four workers: functions, types, operators, futures.
#include "lockstep/rpc/call.h"

#include <c10/core/InferenceMode.h>

#include <set>

#include "lockstep/rpc/dist_autograd.h"
#include "lockstep/rpc/remote_error.h"
#include "lockstep/rpc/remote_module.h"
#include "lockstep/rpc/session.h"
#include "lockstep/rpc/switched_agent.h"
#include "tests/support/rpc_suite.h"

namespace lockstep::rpc_calls_test {

using namespace std::chrono_literals;
using rpc::Callee;
using rpc::Function;
using rpc::Future;
using rpc::RemoteError;
using rpc::rpc_async;
using rpc::rpc_sync;
using rpc::WorkerInfo;
using testing::expect_error;
using Names = std::vector<std::string>;

class RpcCalls : public rpc::RpcSuite<RpcCalls> {};

struct Batch {
  at::Tensor input;
  std::int64_t step = 0;
  Names names;
};
auto rpc_fields(Batch& batch) {
  return std::tie(batch.input, batch.step, batch.names);
}
enum class Colour { kRed, kGreen = 7 };

const auto add = rpc::function("add", [](at::Tensor a, at::Tensor b) { return a + b; });
const auto fail = rpc::function("fail", [](std::string text) { throw std::runtime_error(text); });
const auto fail_in_libtorch = rpc::function("fail_in_libtorch", [] { TORCH_CHECK(false, "a check of libtorch"); });
const auto fail_oddly = rpc::function("fail_oddly", [] { throw 42; });
const auto echo_batch = rpc::function("echo_batch", [](Batch batch) {
  batch.step += 1;
  batch.names.emplace_back("seen");
  return batch;
});
const auto explain = rpc::function("explain", [](std::string text) {
  try {
    rpc_sync("worker2", fail, text);
  } catch (const std::exception& error) {
    throw std::runtime_error(str("while loading shard 7: ", error.what()));
  }
});
const auto slowly = rpc::function("slowly", [](std::int64_t ms) { std::this_thread::sleep_for(1ms * ms); });
const auto counted = rpc::function("counted", [] {
  static std::atomic<std::int64_t> calls = 0;
  return ++calls;
});
const auto nested = rpc::function("nested", [](int to, at::Tensor x) { return rpc_sync(to, add, x, x); });
const auto chain = rpc::function("chain", [](Names rest, at::Tensor x) -> Future<at::Tensor> {
  static const Function<Future<at::Tensor>(Names, at::Tensor)> self("chain");
  if (rest.empty()) {
    const rpc::Promise<at::Tensor> promise;
    promise.set_value(x + 1);
    return promise.future();
  }
  const auto next = rest.front();
  rest.erase(rest.begin());
  return rpc_async(next, self, rest, x + 1);
});
const auto fails_later = rpc::function("fails_later", []() -> Future<std::int64_t> {
  const rpc::Promise<std::int64_t> promise;
  promise.set_exception(std::make_exception_ptr(std::runtime_error("too late")));
  return promise.future();
});

// RPC-13
TEST_F(RpcCalls, ReturnWhatFunctionsReturn) {
  everywhere([](int rank) {
    const auto x = at::ones({2, 2});
    for (int to = 0; to < 4; ++to) EXPECT_TRUE(at::equal(rpc_sync(to, add, x, x), x + x)) << to;
    rpc_sync("worker1", slowly, 1);
    rpc_async("worker1", slowly, 1).wait();
    EXPECT_TRUE(at::equal(rpc::remote("worker2", add, x, x).to_here(), x + x));
    const auto begin = std::chrono::steady_clock::now();
    const auto later = rpc::remote("worker1", slowly, 1000);
    EXPECT_LT(std::chrono::steady_clock::now() - begin, 800ms) << "it does not wait";
    later.to_here();
    // Worker to worker, and back to who asked.
    EXPECT_TRUE(at::equal(rpc_sync((rank + 1) % 4, nested, rank, x), x + x));
    std::vector<Future<at::Tensor>> futures;
    for (int i = 0; i < 300; ++i) futures.push_back(rpc_async(i % 4, add, x, at::full({2, 2}, i)));
    for (int i = 0; i < 300; ++i) EXPECT_TRUE(at::equal(futures[i].wait(), x + i));
    std::atomic<int> right = 0;
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 8; ++thread) {
      threads.emplace_back([&, thread] {
        for (int i = 0; i < 20; ++i) {
          right += at::equal(rpc_sync((thread + i) % 4, add, x, at::full({2, 2}, i)), x + i) ? 1 : 0;
        }
      });
    }
    for (auto& thread : threads) thread.join();
    EXPECT_EQ(right, 160);
  });
}

// RPC-12, RPC-32, RPC-76
TEST_F(RpcCalls, FailWithWorkerFunctionAndText) {
  lead([] {
    expect_error([] { rpc_sync("worker1", fail, "odd weather"); },
                 {"worker 'worker1'", "function 'fail' threw", "odd weather"});
    expect_error([] { rpc_sync("worker1", fail_in_libtorch); }, {"worker 'worker1'", "a check of libtorch"});
    expect_error([] { rpc_sync("worker1", fail_oddly); },
                 {"worker 'worker1'", "'fail_oddly' threw", "no std::exception"});
    expect_error([] { rpc_async("worker2", fails_later).wait(); }, {"'worker2'", "'fails_later' threw", "too late"});
    expect_error([] { rpc::remote("worker2", fails_later).to_here(); },
                 {"worker 'worker2'", "'fails_later' threw", "too late"});
    // Words that a function adds to an error of its own call are kept.
    expect_error(
        [] { rpc_sync("worker1", explain, "disk full"); },
        {"worker 'worker1': function 'explain' threw", "while loading shard 7", "worker 'worker2'", "disk full"});
    expect_error([] { rpc_sync("worker1", Function<void()>("missing")); }, {"worker1", "'missing'", "not registered"});
    {
      const dist_autograd::Context context;
      expect_error([] { rpc_sync("worker1", fail, "odd weather"); }, {"worker 'worker1'", "'fail'", "odd weather"});
    }
    const auto kind_of = [](const std::function<void()>& call) -> std::optional<RemoteError> {
      try {
        call();
      } catch (const RemoteError& error) {
        return error;
      }
      return std::nullopt;
    };
    const auto thrown = kind_of([] { rpc_sync("worker3", fail, "x"); });
    ASSERT_TRUE(thrown);
    EXPECT_EQ(thrown->kind(), RemoteError::Kind::kThrown);
    EXPECT_EQ(thrown->worker(), "worker3");
    EXPECT_EQ(thrown->function(), "fail");
    const auto refused = kind_of([] { rpc_sync("worker3", Function<void()>("missing")); });
    ASSERT_TRUE(refused);
    EXPECT_EQ(refused->kind(), RemoteError::Kind::kRefused);
    EXPECT_EQ(refused->function(), "missing");
    const auto late = kind_of([] { rpc_sync(Callee("worker3").within(30ms), slowly, 300); });
    ASSERT_TRUE(late);
    EXPECT_EQ(late->kind(), RemoteError::Kind::kTimeout);
    // An error of a call that a called function made tells where it was thrown.
    const auto inner =
        kind_of([] { rpc_sync("worker1", Function<at::Tensor(int, at::Tensor)>("nested"), 2, at::Tensor()); });
    ASSERT_TRUE(inner);
    EXPECT_EQ(inner->worker(), "worker2");
    EXPECT_EQ(inner->function(), "add");
    rpc_sync("worker1", slowly, 1);
  });
}

// RPC-12
TEST_F(RpcCalls, ReachFunctionsThatWereRegisteredLater) {
  everywhere([](int rank) {
    const auto late = rpc::function("registered_late", [rank] { return static_cast<std::int64_t>(rank); });
    rpc::barrier();
    EXPECT_EQ(rpc_sync((rank + 1) % 4, late), (rank + 1) % 4);
    expect_error([] { rpc::function("registered_late", [](std::string) {}); },
                 {"'registered_late' is registered twice", "() -> int", "(str) -> None"});
    struct Twice {};
    const rpc::class_<Twice> once("calls.Once");
    expect_error([] { rpc::class_<Twice>("calls.Twice"); }, {"Twice", "'calls.Once' and as 'calls.Twice'"});
    rpc::barrier();
  });
}

using Everything = std::tuple<bool, std::int64_t, double, std::string, Colour, std::optional<std::int64_t>,
                              std::optional<at::Tensor>, std::tuple<std::string, int>, std::vector<at::Tensor>,
                              std::map<std::string, std::vector<double>>, std::unordered_map<int, std::string>>;
const auto echo = rpc::function("echo", [](Everything all) { return all; });
const auto echo_tensor = rpc::function("echo_tensor", [](at::Tensor tensor) { return tensor; });
const auto storage_bytes = rpc::function(
    "storage_bytes", [](at::Tensor tensor) { return static_cast<std::int64_t>(tensor.storage().nbytes()); });
const auto own_name = rpc::function("own_name", [] { return rpc::worker_info().name_; });
const auto name_of = rpc::function("name_of", [](WorkerInfo worker) { return rpc_sync(worker, own_name); });

// RPC-14
TEST_F(RpcCalls, BringTypesThereAndBack) {
  lead([] {
    const Everything all{true,
                         -5,
                         0.25,
                         "text",
                         Colour::kGreen,
                         std::nullopt,
                         at::arange(3),
                         {"in a tuple", 4},
                         {at::ones(2), at::zeros({0, 3})},
                         {{"a", {1.5, 2.5}}, {"b", {}}},
                         {{3, "three"}}};
    const auto back = rpc_sync("worker1", echo, all);
    EXPECT_EQ(std::get<0>(back), true);
    EXPECT_EQ(std::get<1>(back), -5);
    EXPECT_EQ(std::get<2>(back), 0.25);
    EXPECT_EQ(std::get<3>(back), "text");
    EXPECT_EQ(std::get<4>(back), Colour::kGreen);
    EXPECT_EQ(std::get<5>(back), std::nullopt);
    EXPECT_TRUE(at::equal(std::get<6>(back).value(), at::arange(3)));
    EXPECT_EQ(std::get<7>(back), std::get<7>(all));
    EXPECT_EQ(std::get<8>(back).size(), 2);
    EXPECT_EQ(std::get<8>(back)[1].sizes(), at::IntArrayRef({0, 3}));
    EXPECT_EQ(std::get<9>(back), std::get<9>(all));
    EXPECT_EQ(std::get<10>(back), std::get<10>(all));
    const auto batch = rpc_sync("worker1", echo_batch, Batch{at::ones(2), 4, {"a"}});
    EXPECT_EQ(batch.step, 5);
    EXPECT_EQ(batch.names, (Names{"a", "seen"}));

    EXPECT_FALSE(rpc_sync("worker1", echo_tensor, at::Tensor()).defined());
    const auto strided = at::arange(12).view({3, 4}).t().slice(0, 1, 3);
    EXPECT_TRUE(at::equal(rpc_sync("worker1", echo_tensor, strided), strided));
    for (const auto dtype : {at::kHalf, at::kBFloat16, at::kBool, at::kComplexFloat, at::kLong}) {
      const auto tensor = at::arange(6).to(dtype);
      EXPECT_TRUE(at::equal(rpc_sync("worker1", echo_tensor, tensor), tensor)) << dtype;
    }
    const auto sparse = at::eye(3).to_sparse();
    const auto sparse_back = rpc_sync("worker1", echo_tensor, sparse);
    EXPECT_TRUE(sparse_back.is_sparse());
    EXPECT_TRUE(at::equal(sparse_back.to_dense(), at::eye(3)));
    EXPECT_EQ(rpc_sync("worker1", name_of, rpc::worker_info("worker3")), "worker3");
  });
}

const auto tiny = rpc::function("tiny", [](std::int8_t x) { return x; });
const auto half = rpc::function("half", [](double x) { return x / 2; });
const auto table = rpc::function("table", [](std::map<std::string, int> x) { return x; });
const auto allow = rpc::function("allow", [](std::string name) { rpc::allow_operator(name); });
const auto trained = rpc::function("trained", [](at::Tensor x) {
  const auto w = at::ones(3).requires_grad_();
  (x * w).pow(2).sum().backward();
  return w.grad();
});
std::mutex held_mutex;
std::vector<rpc::RRef<at::Tensor>> held;
const auto hold = rpc::function("hold", [](rpc::RRef<at::Tensor> ref) {
  const std::lock_guard lock(held_mutex);
  held.push_back(std::move(ref));
});
const auto let_go = rpc::function("let_go", [] {
  const std::lock_guard lock(held_mutex);
  held.clear();
});

const auto write_to = rpc::function("write_to", [](at::Tensor x) { return x.add_(1); });

// RPC-13
TEST_F(RpcCalls, GiveFunctionsTensorsOfTheirOwn) {
  lead([] {
    for (int worker = 0; worker < 2; ++worker) {
      const auto x = at::zeros(3);
      const auto y = rpc_sync(worker, write_to, x);
      EXPECT_TRUE(at::equal(y, at::ones(3)));
      EXPECT_TRUE(at::equal(x, at::zeros(3))) << "also if the callee is oneself: " << worker;
    }
  });
}

// RPC-14
TEST_F(RpcCalls, RefuseOtherTypesByPosition) {
  lead([] {
    expect_error([] { rpc_sync("worker1", Function<void(int)>("add"), 1); },
                 {"worker1", "'add' was refused", "(Tensor, Tensor) -> Tensor", "1 argument"});
    expect_error([] { rpc_sync("worker1", Function<void(at::Tensor, int)>("add"), at::ones(1), 2); },
                 {"'add'", "argument 2", "expected Tensor, got Int"});
    expect_error([] { rpc_sync("worker1", Function<void(double)>("slowly"), 0.5); },
                 {"'slowly'", "argument 1", "expected int, got Double"});
    expect_error(
        [] {
          rpc_sync("worker1", Function<void(std::tuple<at::Tensor, int>)>("echo_batch"), std::tuple(at::ones(1), 1));
        },
        {"'echo_batch'", "argument 1", "3", "2"});
    expect_error([] { rpc_sync("worker1", tiny, 300); }, {"int of 1 bytes", "300"});
    expect_error([] { rpc_sync("worker1", slowly, std::uint64_t{1} << 63); }, {"int of 8 bytes"});
    expect_error([] { rpc_sync("worker1", Function<void(int)>("tiny"), 300); },
                 {"argument 1", "int of 1 bytes", "300"});
    const auto x = at::ones(1);
    expect_error([&] { rpc_sync("worker1", Function<void(at::Tensor, at::Tensor, at::Tensor)>("add"), x, x, x); },
                 {"'add' was refused", "3 arguments"});
    expect_error([] { rpc_sync("worker1", Function<void(Names)>("table"), Names{"a"}); },
                 {"argument 1", "Dict[str, int]"});
    expect_error([] { rpc_sync("worker1", Function<void(std::string)>("half"), "1"); }, {"expected float, got String"});
    EXPECT_EQ(rpc_sync("worker1", Function<double(int)>("half"), 3), 1.5) << "an integer is a number";
    expect_error([&] { rpc_sync("worker1", echo_tensor, at::ones({2, 2}).to_sparse_csr()); },
                 {"layout SparseCsr does not travel", "to_dense()"});
    expect_error([&] { rpc_sync("worker1", echo_tensor, at::ones({2, 2}).to_mkldnn()); }, {"does not travel"});
    rpc_sync("worker1", slowly, 1);
  });
}

// RPC-12
TEST_F(RpcCalls, RunInNobodyElsesMode) {
  everywhere([](int rank) {
    // worker0 waits in inference mode, and reads others' mail meanwhile.
    const c10::InferenceMode mode(rank == 0);
    for (int i = 0; i < 300; ++i) {
      if (rank == 0) {
        rpc_sync("worker1", echo_tensor, at::ones(3));
      } else {
        EXPECT_TRUE(at::equal(rpc_sync("worker0", trained, at::ones(3)), at::full({3}, 2.0)));
      }
    }
    EXPECT_TRUE(at::equal(rpc_sync(rank, trained, at::ones(3)), at::full({3}, 2.0))) << "to oneself too";
  });
}

// RPC-15
TEST_F(RpcCalls, ReachOperatorsThatAreAllowed) {
  lead([] {
    using Binary = at::Tensor(at::Tensor, at::Tensor);
    const auto x = at::ones({3, 3});
    EXPECT_TRUE(at::equal(rpc_sync("worker1", rpc::builtin<Binary>("aten::add.Tensor"), x, x), x + x));
    EXPECT_TRUE(at::equal(rpc::remote("worker1", rpc::builtin<Binary>("aten::matmul"), x, x).to_here(), x.matmul(x)));
    EXPECT_TRUE(at::equal(
        rpc_sync("worker1", rpc::builtin<at::Tensor(std::vector<at::Tensor>)>("aten::cat"), std::vector{x, x}),
        at::cat({x, x})));
    expect_error([&] { rpc_sync("worker1", rpc::builtin<Binary>("aten::matmul"), x, at::ones({6, 6})); },
                 {"worker1", "aten::matmul", "3x3 and 6x6"});
    expect_error([&] { rpc_sync("worker1", rpc::builtin<at::Tensor(at::Tensor)>("aten::add.Tensor"), x); },
                 {"aten::add", "missing value for argument 'other'"});
    expect_error([] { rpc_sync("worker1", rpc::builtin<at::Tensor(std::string)>("aten::from_file"), "/etc/passwd"); },
                 {"aten::from_file", "not allowed", "allow_operator()"});
    expect_error([&] { rpc_sync("worker1", rpc::builtin<Binary>("aten::no_such_thing"), x, x); },
                 {"aten::no_such_thing"});
    const auto erf = rpc::builtin<at::Tensor(at::Tensor)>("aten::erf");
    expect_error([&] { rpc_sync("worker1", erf, x); }, {"not allowed"});
    rpc_sync("worker1", allow, "aten::erf");
    EXPECT_TRUE(at::allclose(rpc_sync("worker1", erf, x), x.erf()));
  });
}

// RPC-19
TEST_F(RpcCalls, SendOfAViewOnlyWhatItShows) {
  lead([] {
    const auto large = at::ones({1 << 20});
    const auto bytes = rpc_sync("worker1", storage_bytes, large.slice(0, 5, 13));
    EXPECT_LE(bytes, 64) << "of " << large.storage().nbytes();
    EXPECT_EQ(rpc_sync("worker1", storage_bytes, large), large.storage().nbytes());
  });
}

// RPC-20
TEST_F(RpcCalls, HaveFuturesThatWaitChainAndTellErrors) {
  lead([] {
    const auto x = at::ones(2);
    const auto future = rpc_async("worker1", add, x, x);
    EXPECT_TRUE(at::equal(future.wait(), future.wait()));
    EXPECT_TRUE(future.done());
    EXPECT_FALSE(future.has_error());
    const auto chained = rpc_async("worker1", add, x, x)
                             .then([](at::Tensor sum) { return sum.sum().item<double>(); })
                             .then([](double sum) { return rpc_async("worker2", add, at::full(1, sum), at::ones(1)); })
                             .then([](at::Tensor sum) { return str("it is ", sum.item<double>()); });
    EXPECT_EQ(chained.wait(), "it is 5");
    bool was_called = false;
    const auto after_error = rpc_async("worker1", fail, "no luck").then([&] { was_called = true; });
    expect_error([&] { after_error.wait(); }, {"worker1", "fail", "no luck"});
    EXPECT_TRUE(after_error.has_error());
    EXPECT_FALSE(was_called);
    expect_error(
        [&] { rpc_async("worker1", add, x, x).then([](at::Tensor) { throw std::runtime_error("mine"); }).wait(); },
        {"mine"});
    expect_error([] { Future<int>().wait(); }, {"made by no call"});

    // All are waited for, though one fails early.
    std::vector<Future<void>> several = {rpc_async("worker1", fail, "first"), rpc_async("worker2", slowly, 100),
                                         rpc_async("worker3", fail, "second")};
    expect_error([&] { rpc::wait_all(several); }, {"first"});
    EXPECT_TRUE(several[1].done());
    const auto values = rpc::wait_all(std::vector{rpc_async("worker1", add, x, x), rpc_async("worker2", add, x, x)});
    EXPECT_TRUE(at::equal(values[0] + values[1], 4 * x));

    Future<void> slow;
    Future<void> elsewhere;
    expect_error(
        [&] {
          const rpc::WaitAll scope;
          std::thread([&] { elsewhere = rpc_async("worker1", slowly, 2000); }).join();
          slow = rpc_async("worker2", slowly, 100);
          rpc_async("worker1", fail, "inside of the scope");
        },
        {"inside of the scope"});
    EXPECT_TRUE(slow.done());
    EXPECT_FALSE(elsewhere.done()) << "another thread's call is not this scope's";
    elsewhere.wait();
    // With an error of the program's own under way, and in scopes that nest.
    expect_error(
        [&] {
          const rpc::WaitAll scope;
          slow = rpc_async("worker2", slowly, 100);
          throw std::runtime_error("mine");
        },
        {"mine"});
    EXPECT_TRUE(slow.done());
    {
      const rpc::WaitAll outer;
      { const rpc::WaitAll inner; }
      slow = rpc_async("worker2", slowly, 100);
    }
    EXPECT_TRUE(slow.done());
  });
}

// RPC-9
TEST_F(RpcCalls, GoToNamesRanksAndWorkers) {
  lead([] {
    EXPECT_EQ(rpc_sync("worker2", own_name), "worker2");
    EXPECT_EQ(rpc_sync(3, own_name), "worker3");
    EXPECT_EQ(rpc_sync(rpc::worker_info("worker1"), own_name), "worker1");
    EXPECT_EQ(rpc::worker_info().name_, "worker0");
    EXPECT_EQ(rpc::worker_info(2).name_, "worker2");
    const auto all = rpc::worker_infos();
    ASSERT_EQ(all.size(), 4);
    for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(all[rank].name_, str("worker", rank));
    expect_error([] { rpc_sync("nobody", own_name); }, {"no worker 'nobody'", "'worker2' (rank 2)"});
    expect_error([] { rpc_sync(4, own_name); }, {"no worker '4'"});
    expect_error([] { rpc_sync(65537, own_name); }, {"no worker '65537'"});
    expect_error([] { rpc::remote("nobody", own_name); }, {"no worker 'nobody'"});
  });
}

// RPC-31, RPC-21
TEST_F(RpcCalls, EndAtTheirTimeLimit) {
  lead([] {
    EXPECT_EQ(rpc::rpc_timeout(), 60s);
    expect_error([] { rpc_sync(Callee("worker1").within(50ms), slowly, 400); },
                 {"worker1", "'slowly' gave no answer in time", "50 ms"});
    rpc::set_rpc_timeout(100ms);
    expect_error([] { rpc_sync("worker1", slowly, 500); }, {"worker1", "slowly", "100 ms"});
    expect_error([] { rpc_async("worker1", slowly, 500).wait(); }, {"worker1", "slowly"});
    rpc_sync(Callee("worker1").within(10s), slowly, 300);
    rpc_sync(Callee("worker1").within(0s), slowly, 300);
    // A call under way keeps the limit it began with.
    rpc::set_rpc_timeout(60s);
    const auto before = rpc_async("worker1", slowly, 300);
    rpc::set_rpc_timeout(50ms);
    before.wait();
    rpc::set_rpc_timeout(60s);
    expect_error([] { rpc::set_rpc_timeout(-1s); }, {"-1"});
    expect_error([] { Callee("worker1").within(-1s); }, {"-1"});
    // Calls whose answers came too late ran once, all the same.
    const auto runs = rpc_sync("worker2", counted);
    for (int i = 0; i < 5; ++i) {
      try {
        rpc_sync(Callee("worker2").within(1us), counted);
      } catch (const RemoteError&) {
      }
    }
    std::int64_t now = 0;
    EXPECT_TRUE(rpc::eventually([&] { return (now = rpc_sync("worker2", counted)) >= runs + 6; }));
    std::this_thread::sleep_for(50ms);
    EXPECT_EQ(rpc_sync("worker2", counted), now + 1) << "nothing ran again by itself";
  });
}

// RPC-10
TEST_F(RpcCalls, GatherTextsAmongWorkers) {
  everywhere([](int rank) {
    const auto own = str("worker", rank);
    const auto all = rpc::all_gather(str("text of ", rank));
    ASSERT_EQ(all.size(), 4);
    for (int each = 0; each < 4; ++each) EXPECT_EQ(all.at(str("worker", each)), str("text of ", each));
    // Two halves at once, several times; each worker in pairs from two threads.
    const Names half = rank < 2    ? Names{"worker0", "worker1"}
                       : rank == 2 ? Names{"worker2", "worker3"}
                                   : Names{"worker3", "worker2"};
    const Names other = rank % 2 == 0 ? Names{"worker0", "worker2"} : Names{"worker1", "worker3"};
    std::thread beside([&] {
      for (int i = 0; i < 20; ++i) EXPECT_EQ(rpc::all_gather(str(i), other).size(), 2);
    });
    for (int i = 0; i < 20; ++i) {
      const auto texts = rpc::all_gather(str(i), half);
      EXPECT_EQ(texts.size(), 2);
      for (const auto& [name, text] : texts) EXPECT_EQ(text, str(i));
    }
    beside.join();
    rpc::barrier();
    // The smallest name leads.
    std::mutex mutex;
    std::set<std::string> asked;
    rpc::detail::switched_agent()->set_send_hook([&](const WorkerInfo& to, const auto& /*message*/) {
      const std::lock_guard lock(mutex);
      asked.insert(to.name_);
    });
    rpc::barrier();
    rpc::detail::switched_agent()->set_send_hook(nullptr);
    EXPECT_EQ(asked, std::set<std::string>{"worker0"});
    rpc::barrier();
    if (rank == 1 || rank == 3) std::this_thread::sleep_for(800ms);
    if (rank == 0 || rank == 2) {
      expect_error([] { rpc::barrier({"worker0", "worker1", "worker2", "worker3"}, 300ms); },
                   {"waited 0.3 s", "worker1, worker3", "did not come"});
    }
    // Whoever is late finds that the others had come.
    if (rank == 1 || rank == 3) rpc::barrier({"worker0", "worker1", "worker2", "worker3"});
    expect_error([&] { rpc::barrier({str("worker", (rank + 1) % 4)}); }, {own, "none of them"});
    rpc::barrier();
  });
}

// RPC-11
TEST_F(RpcCalls, LeaveNothingUnderWay) {
  everywhere([](int rank) {
    {
      const dist_autograd::Context context;
      auto x = at::ones(2).requires_grad_();
      dist_autograd::backward(context.id(), {rpc_sync((rank + 1) % 4, add, x, x).sum()});
      const auto kept = rpc::remote((rank + 2) % 4, add, x, x);
      EXPECT_NE(rpc::debug_info().at("dist_autograd.num_autograd_contexts"), "0");
      kept.to_here();
      // It counts what is under way.
      EXPECT_NE(rpc::debug_info().at("dist_autograd.num_autograd_contexts"), "0");
    }
    const auto call = rpc_async((rank + 1) % 4, slowly, 200);
    EXPECT_NE(rpc::debug_info().at("agent.client_active_calls"), "0");
    call.wait();
    {
      const rpc::RRef<at::Tensor> own(at::ones(1));
      rpc_sync((rank + 1) % 4, hold, own);
      EXPECT_EQ(rpc::debug_info().at("rref.num_owner_rrefs"), "1");
      EXPECT_EQ(rpc::debug_info().at("rref.num_forks"), "1");
      rpc_sync((rank + 1) % 4, let_go);
    }
    rpc::barrier();
    std::vector<std::string> counts = {"rref.num_pending_users",
                                       "rref.num_owner_rrefs",
                                       "rref.num_forks",
                                       "rref.num_pending_futures",
                                       "agent.client_active_calls",
                                       "dist_autograd.num_autograd_contexts",
                                       "dist_autograd.num_current_backward_passes"};
    if (rank != 0) counts.emplace_back("agent.server_active_calls");  // others wait for worker0 at the barrier below
    for (const auto& key : counts) {
      std::string value = "is missing";
      EXPECT_TRUE(rpc::eventually([&] {
        const auto info = rpc::debug_info();
        const auto found = info.find(key);
        value = found == info.end() ? "is missing" : found->second;
        return value == "0";
      })) << key
          << " " << value;
    }
    EXPECT_EQ(rpc::debug_info().at("agent.thread_pool_size"), "16");
    rpc::barrier();
  });
}

// RPC-8
TEST_F(RpcCalls, EndWithNothingLeft) {
  end();
}

/// Its own workers, with these options.
void run(int world_size, const rpc::RpcOptions& options, const std::function<void(int rank)>& body) {
  testing::run_processes_in_gtest({.world_size = world_size, .backend = "gloo"}, [&](const World& world) {
    rpc::init_rpc(str("worker", world.rank()), world.rank(), world.world_size(), options);
    body(world.rank());
    rpc::shutdown();
  });
}

const rpc::Function<at::Tensor(int, int, at::Tensor)> bounce_itself("bounce");
const auto bounce = rpc::function("bounce", [](int times, int to, at::Tensor x) -> at::Tensor {
  if (times == 0) return x;
  return rpc_sync(Callee(to).within(1500ms), bounce_itself, times - 1, 1 - to, x);
});

// RPC-17, RPC-18
TEST(RpcSmallPool, ServesChainsOfFuturesButNotOfThreads) {
  run(3, {.num_worker_threads = 1}, [](int rank) {
    if (rank != 0) return;
    const auto x = at::zeros(1);
    // Functions that return futures free their thread: longer chains than there are threads, many at once.
    std::vector<Future<at::Tensor>> chains;
    for (int i = 0; i < 10; ++i) {
      chains.push_back(rpc_async("worker1", chain, Names{"worker2", "worker0", "worker1", "worker2"}, x));
    }
    for (const auto& each : rpc::wait_all(chains)) EXPECT_EQ(each.item<double>(), 5);
    // Functions that wait hold theirs.
    expect_error([&] { rpc_sync(Callee("worker1").within(10s), bounce, 5, 0, x); },
                 {"'bounce' gave no answer in time", "1500 ms"});
    EXPECT_TRUE(rpc::eventually([&] {
      try {
        return at::equal(rpc_sync(Callee("worker1").within(1s), bounce, 0, 0, x), x);
      } catch (const RemoteError&) {
        return false;
      }
    })) << "it serves on";
  });
}

}  // namespace lockstep::rpc_calls_test
