// Distributed autograd: contexts, backwards and their gradients.
#include "lockstep/rpc/dist_autograd.h"

#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/nn/modules/linear.h>

#include "lockstep/rpc/call.h"
#include "lockstep/rpc/context_scope.h"
#include "tests/support/rpc_suite.h"

namespace lockstep::rpc_autograd_test {

using namespace std::chrono_literals;
using dist_autograd::Context;
using dist_autograd::get_gradients;
using rpc::rpc_async;
using rpc::rpc_sync;
using rpc::RRef;
using testing::expect_error;

class DistAutograd : public rpc::RpcSuite<DistAutograd> {};

const auto multiply = rpc::function("autograd.multiply", [](at::Tensor a, at::Tensor b) { return a * b; });
const auto context_count =
    rpc::function("autograd.context_count", [] { return rpc::debug_info().at("dist_autograd.num_autograd_contexts"); });
at::Tensor table() {
  static const auto weight = at::arange(6, at::kDouble).view({3, 2}).clone().requires_grad_();
  return weight;
}
const auto look_up = rpc::function("autograd.look_up", [](at::Tensor ids) { return table().index_select(0, ids); });
const auto table_gradient =
    rpc::function("autograd.table_gradient", [](std::int64_t context) { return get_gradients(context).at(table()); });
const auto plain_grad = rpc::function("autograd.plain_grad", [] { return table().grad().defined(); });

bool no_context_is_left() {
  return rpc::eventually([] {
    for (int worker = 0; worker < 4; ++worker) {
      if (rpc_sync(worker, context_count) != "0") return false;
    }
    return true;
  });
}

// RPC-36
TEST_F(DistAutograd, ReleasesContextsEverywhere) {
  lead([] {
    std::int64_t last = 0;
    for (int i = 0; i < 200; ++i) {
      const Context context;
      EXPECT_EQ(context.id() >> 48, 0) << "rank 0's";
      EXPECT_GT(context.id(), last - (i == 0 ? 1 : 0));
      last = context.id();
      if (i % 10 == 0) rpc_sync(1 + i / 10 % 3, multiply, at::ones(1).requires_grad_(), at::ones(1));
    }
    EXPECT_TRUE(no_context_is_left());
    expect_error([&] { get_gradients(last); }, {"no distributed autograd context", str(last), "worker0"});
    std::int64_t id = -1;
    expect_error(
        [&] {
          const Context context;
          id = context.id();
          rpc_sync("worker1", multiply, at::ones(1).requires_grad_(), at::ones(1));
          expect_error([] { const Context second; }, {str(context.id()), "do not nest"});
          throw std::runtime_error("on the way");
        },
        {"on the way"});
    EXPECT_TRUE(no_context_is_left());
    expect_error([&] { dist_autograd::backward(id, {at::ones(1)}); }, {str(id)});
    const Context after;
    EXPECT_GT(after.id(), id);
  });
  everywhere([](int rank) {
    const Context context;
    EXPECT_EQ(context.id() >> 48, rank);
  });
}

// RPC-37
TEST_F(DistAutograd, LinksResultsOfCallsWithoutTensorsThatNeedGradients) {
  lead([] {
    const auto ids = at::tensor({2, 0, 2});
    EXPECT_EQ(rpc_sync("worker2", look_up, ids).grad_fn(), nullptr) << "no context, no link";
    const Context context;
    const auto rows = rpc_sync("worker2", look_up, ids);
    ASSERT_NE(rows.grad_fn(), nullptr);
    dist_autograd::backward(context.id(), {rows.sum()});
    const auto expected = at::tensor({1.0, 1.0, 0.0, 0.0, 2.0, 2.0}, at::kDouble).view({3, 2});
    EXPECT_TRUE(at::equal(rpc_sync("worker2", table_gradient, context.id()), expected));
    EXPECT_FALSE(rpc_sync("worker2", plain_grad));
    EXPECT_EQ(get_gradients(context.id()).size(), 0) << "nothing of this worker took part";
  });
}

const auto current_context =
    rpc::function("autograd.current_context", [] { return rpc::detail::current_context_id(); });
const auto contexts_on_the_way = rpc::function("autograd.contexts_on_the_way", [](int next) {
  std::int64_t of_thread = 0;
  std::thread([&] { of_thread = rpc::detail::current_context_id(); }).join();
  return std::vector<std::int64_t>{rpc::detail::current_context_id(), rpc_sync(next, current_context), of_thread};
});
const auto in_continuation = rpc::function("autograd.in_continuation", [](int next, at::Tensor x) {
  return rpc_async(next, multiply, x, x).then([next](at::Tensor y) {
    return rpc_async(next, multiply, y, y).then([](at::Tensor z) { return z * rpc::detail::current_context_id(); });
  });
});
const auto slowly_multiply = rpc::function("autograd.slowly_multiply", [](at::Tensor a, at::Tensor b) {
  std::this_thread::sleep_for(300ms);
  return a * b;
});

// RPC-38
TEST_F(DistAutograd, FollowsNestedCallsAndContinuations) {
  lead([] {
    EXPECT_EQ(rpc_sync("worker1", current_context), -1);
    const Context context;
    EXPECT_EQ(rpc_sync("worker1", contexts_on_the_way, 2), (std::vector<std::int64_t>{context.id(), context.id(), -1}));
    std::int64_t of_thread = 0;
    std::thread([&] { of_thread = rpc_sync("worker1", current_context); }).join();
    EXPECT_EQ(of_thread, -1);
    auto x = at::full({1}, 2.0, at::kDouble).requires_grad_();
    const auto fourth_power = rpc_sync("worker1", in_continuation, 2, x);
    dist_autograd::backward(context.id(), {fourth_power.sum()});
    EXPECT_DOUBLE_EQ(get_gradients(context.id()).at(x).item<double>(), 4 * 8.0 * context.id());
    EXPECT_EQ(rpc_async("worker1", current_context).then([](std::int64_t id) { return id; }).wait(), context.id());
  });
  lead([] {
    // What a slow remote call makes is part of the backward that asks for it.
    const Context context;
    auto x = at::full({1}, 3.0).requires_grad_();
    const auto product = rpc::remote("worker1", slowly_multiply, x, x);
    dist_autograd::backward(context.id(), {product.to_here().sum()});
    EXPECT_EQ(get_gradients(context.id()).at(x).item<float>(), 6);
  });
}

// RPC-40
TEST_F(DistAutograd, GoesThroughCallsToOneself) {
  everywhere([](int rank) {
    const Context context;
    auto x = at::full({2}, 3.0).requires_grad_();
    const auto y = rpc_sync(rank, multiply, x, x);
    EXPECT_TRUE(x.is_leaf());
    dist_autograd::backward(context.id(), {rpc_sync(rank, multiply, y, x).sum()});
    EXPECT_TRUE(at::allclose(get_gradients(context.id()).at(x), 3 * x * x));
  });
}

// RPC-39
TEST_F(DistAutograd, RefusesRootsThatCannotBe) {
  lead([] {
    const Context context;
    const auto backward = [&](const std::vector<at::Tensor>& roots) { dist_autograd::backward(context.id(), roots); };
    expect_error([&] { backward({}); }, {"no roots"});
    expect_error([&] { backward({at::ones(1)}); }, {"root 0", "requires no gradient"});
    expect_error([&] { backward({at::Tensor()}); }, {"root 0", "requires no gradient"});
    const auto x = at::ones(2).requires_grad_();
    expect_error([&] { backward({x.sum(), x * 2}); }, {"root 1", "2 elements", "scalar"});
    expect_error([&] { backward({at::ones(1).requires_grad_()}); }, {"root 0", "leaf"});
    expect_error([&] { dist_autograd::backward(context.id() + 1, {x.sum()}); }, {str(context.id() + 1)});
    backward({x.sum()});
    // It blocks until all are done: the other worker's gradients are there.
    const auto rows = rpc_sync("worker3", look_up, at::tensor({1}));
    backward({rpc_sync("worker2", slowly_multiply, rows, rows).sum()});
    EXPECT_TRUE(at::equal(rpc_sync("worker3", table_gradient, context.id()),
                          at::tensor({0.0, 0.0, 4.0, 6.0, 0.0, 0.0}, at::kDouble).view({3, 2})));
  });
}

// RPC-40
TEST_F(DistAutograd, KeepsGradientsInTheirContext) {
  lead([] {
    auto a = at::rand({3, 3}, at::kDouble).requires_grad_();
    auto b = at::rand({3, 3}, at::kDouble).requires_grad_();
    a.mutable_grad() = at::full({3, 3}, 100.0, at::kDouble);
    {
      // Without any call.
      const Context context;
      dist_autograd::backward(context.id(), {(a * b).sum()});
      EXPECT_EQ(get_gradients(context.id()).size(), 2);
      EXPECT_TRUE(at::equal(get_gradients(context.id()).at(a), b));
    }
    {
      // Several hops, twice: they add up.
      const Context context;
      const auto product = rpc_sync("worker1", multiply, a, rpc_sync("worker2", multiply, b, a));
      const auto loss = product.sum();
      dist_autograd::backward(context.id(), {loss}, {.retain_graph = true});
      dist_autograd::backward(context.id(), {loss});
      EXPECT_TRUE(at::allclose(get_gradients(context.id()).at(a), 4 * a * b));
      EXPECT_TRUE(at::allclose(get_gradients(context.id()).at(b), 2 * a * a));
    }
    {
      // Several roots, through several workers.
      const Context context;
      dist_autograd::backward(context.id(), {rpc_sync("worker1", multiply, a, b).sum(),
                                             rpc_sync("worker2", multiply, a, a).sum(), (b * 3).sum()});
      EXPECT_TRUE(at::allclose(get_gradients(context.id()).at(a), b + 2 * a));
      EXPECT_TRUE(at::allclose(get_gradients(context.id()).at(b), a + 3));
    }
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kComplexDouble}) {
      const Context context;
      auto x = at::ones(2, dtype).requires_grad_();
      dist_autograd::backward(context.id(), {at::real(rpc_sync("worker1", multiply, x, x)).sum()});
      EXPECT_EQ(get_gradients(context.id()).at(x).scalar_type(), dtype);
    }
    EXPECT_TRUE(at::equal(a.grad(), at::full({3, 3}, 100.0, at::kDouble)));
    EXPECT_FALSE(b.grad().defined());
  });
}

// RPC-40
TEST_F(DistAutograd, DoesNotMixContexts) {
  everywhere([](int rank) {
    // All workers at once, each by several threads on one.
    std::atomic<int> right = 0;
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 20; ++thread) {
      threads.emplace_back([&, thread] {
        try {
          const Context context;
          auto x = at::full({2}, rank + thread + 1.0, at::kDouble).requires_grad_();
          const auto y = rpc_sync("worker1", multiply, x, x);
          dist_autograd::backward(context.id(), {rpc_sync((rank + 1) % 4, multiply, y, x).sum()});
          const auto gradients = get_gradients(context.id());
          right += gradients.size() == 1 && at::allclose(gradients.at(x), 3 * x * x) ? 1 : 0;
        } catch (const std::exception& error) {
          ADD_FAILURE() << error.what();
        }
      });
    }
    for (auto& each : threads) each.join();
    EXPECT_EQ(right, 20);
  });
}

const auto sparse_rows = rpc::function("autograd.sparse_rows", [](at::Tensor weight, at::Tensor ids) {
  return at::embedding(weight, ids, -1, false, /*sparse=*/true);
});

// RPC-40
TEST_F(DistAutograd, CarriesSparseGradients) {
  lead([] {
    const Context context;
    auto weight = at::rand({4, 2}).requires_grad_();
    const auto rows = rpc_sync("worker1", sparse_rows, weight, at::tensor({1, 3, 1}));
    dist_autograd::backward(context.id(), {rows.sum()}, {.retain_graph = true});
    const auto gradient = get_gradients(context.id()).at(weight);
    EXPECT_TRUE(gradient.is_sparse());
    const auto expected = at::tensor({0.0F, 0.0F, 2.0F, 2.0F, 0.0F, 0.0F, 1.0F, 1.0F}).view({4, 2});
    EXPECT_TRUE(at::equal(gradient.to_dense(), expected));
    dist_autograd::backward(context.id(), {rows.sum()});
    EXPECT_TRUE(at::equal(get_gradients(context.id()).at(weight).to_dense(), 2 * expected));
  });
}

std::atomic<int> hooks_before = 0;
std::atomic<int> hooks_after = 0;
std::atomic<int> hooks_after_grad = 0;

using torch::autograd::variable_list;
struct Doubling : torch::autograd::FunctionPreHook {
  variable_list operator()(const variable_list& grads) override {
    ++hooks_before;
    return {grads[0] * 2};
  }
};
struct CountingAccumulation : torch::autograd::FunctionPostHook {
  variable_list operator()(const variable_list& outputs, const variable_list& /*inputs*/) override {
    ++hooks_after;
    return outputs;
  }
};
struct CountingGrad : torch::autograd::PostAccumulateGradHook {
  void operator()(const torch::autograd::Variable& /*tensor*/) override { ++hooks_after_grad; }
};

// RPC-41
TEST_F(DistAutograd, RunsHooksOfTensorsAndAccumulators) {
  lead([] {
    auto x = at::ones(2).requires_grad_();
    auto w = at::full({2}, 3.0).requires_grad_();
    x.register_hook([](const at::Tensor& grad) { return grad * 10; });
    const auto accumulator = torch::autograd::impl::grad_accumulator(w);
    accumulator->add_pre_hook(std::make_unique<Doubling>());
    accumulator->add_post_hook(std::make_unique<CountingAccumulation>());
    torch::autograd::impl::set_post_acc_grad_hooks(w, std::make_unique<CountingGrad>());
    const Context context;
    dist_autograd::backward(context.id(), {rpc_sync("worker1", multiply, x, w).sum()});
    EXPECT_TRUE(at::equal(get_gradients(context.id()).at(x), at::full({2}, 30.0)));
    EXPECT_TRUE(at::equal(get_gradients(context.id()).at(w), at::full({2}, 2.0)));
    EXPECT_EQ(hooks_before, 1);
    EXPECT_EQ(hooks_after, 1);
    EXPECT_EQ(hooks_after_grad, 0) << "there is no .grad it could be called with";
  });
}

struct Faulty : torch::autograd::Function<Faulty> {
  static at::Tensor forward(torch::autograd::AutogradContext* /*context*/, const at::Tensor& x) { return x * 1; }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* /*context*/,
                                                 const torch::autograd::variable_list& grads) {
    if (fails) throw std::runtime_error("an error on the way back");
    return {grads[0]};
  }
  static inline std::atomic<bool> fails = true;
};
const auto faulty = rpc::function("autograd.faulty", [](at::Tensor x) { return Faulty::apply(x); });
const auto mend = rpc::function("autograd.mend", [](bool fails) { Faulty::fails = fails; });

// RPC-42
TEST_F(DistAutograd, TellsWhereABackwardFailed) {
  lead([] {
    rpc_sync("worker2", mend, true);
    const Context context;
    auto x = at::full({2}, 2.0).requires_grad_();
    const auto loss = rpc_sync("worker2", faulty, x * 3).sum();
    for (int i = 0; i < 50; ++i) {
      expect_error([&] { dist_autograd::backward(context.id(), {loss}, {.retain_graph = true}); },
                   {str("backward of context ", context.id()), "worker 'worker2'", "an error on the way back"});
    }
    rpc_sync("worker2", mend, false);
    dist_autograd::backward(context.id(), {loss});
    EXPECT_TRUE(get_gradients(context.id()).contains(x));
  });
  lead([] {
    {
      // Through two workers: where it was thrown is told, not where it passed.
      rpc_sync("worker2", mend, true);
      const Context context;
      auto x = at::full({2}, 2.0).requires_grad_();
      const auto loss = rpc_sync("worker1", multiply, x, rpc_sync("worker2", faulty, x * 3)).sum();
      expect_error([&] { dist_autograd::backward(context.id(), {loss}); },
                   {"worker 'worker2'", "an error on the way back"});
      rpc_sync("worker2", mend, false);
    }
    // A context of its own has what one backward gives.
    const Context context;
    auto x = at::full({2}, 2.0).requires_grad_();
    dist_autograd::backward(context.id(), {rpc_sync("worker2", faulty, x * 3).sum()});
    EXPECT_TRUE(at::equal(get_gradients(context.id()).at(x), at::full({2}, 3.0)));
  });
}

const auto fail_first = rpc::function("autograd.fail_first", [](at::Tensor x) {
  static std::atomic<int> calls = 0;
  TORCH_CHECK(++calls % 2 == 0, "the first time fails");
  return x * 2;
});

// RPC-43
TEST_F(DistAutograd, RefusesBackwardsThatWouldWaitForEver) {
  lead([] {
    auto x = at::ones(2).requires_grad_();
    {
      const Context context;
      const auto y = rpc_sync("worker1", multiply, x, x);
      const auto unused = rpc_sync("worker2", multiply, y, y);
      expect_error([&] { dist_autograd::backward(context.id(), {y.sum()}); },
                   {"'autograd.multiply' on worker 'worker2'", "does not contribute to a root"});
      dist_autograd::backward(context.id(), {y.sum(), unused.sum()});
    }
    {
      // A second batch in one context.
      const Context context;
      dist_autograd::backward(context.id(), {rpc_sync("worker1", multiply, x, x).sum()});
      const auto second = rpc_sync("worker1", multiply, x, x);
      expect_error([&] { dist_autograd::backward(context.id(), {second.sum()}); },
                   {"worker 'worker1'", "A context is for one backward"});
    }
    {
      // A call that failed and was made again.
      const Context context;
      const auto hidden = x * 2;
      expect_error([&] { rpc_sync("worker1", fail_first, hidden); }, {"the first time fails"});
      const auto y = rpc_sync("worker1", fail_first, hidden);
      expect_error([&] { dist_autograd::backward(context.id(), {y.sum()}); },
                   {"'autograd.fail_first' on worker 'worker1'", "failed", "Begin a new context"});
    }
    {
      // A look at another worker's parameters is nobody's business.
      const Context context;
      const auto looked_at = rpc_sync("worker3", look_up, at::tensor({1}));
      dist_autograd::backward(context.id(), {rpc_sync("worker1", multiply, x, x).sum()});
      EXPECT_TRUE(at::equal(get_gradients(context.id()).at(x), 2 * x));
    }
  });
}

// RPC-36
TEST_F(DistAutograd, ContextsMayEndOnAnotherThread) {
  lead([] {
    auto context = std::make_unique<Context>();
    std::thread([&] { context.reset(); }).join();
    EXPECT_EQ(rpc_sync("worker1", current_context), -1);
    auto other = std::make_unique<Context>();
    std::thread([&] { other.reset(); }).join();
    const Context after;
    EXPECT_EQ(rpc_sync("worker1", current_context), after.id());
  });
  lead([] {
    // A continuation leaves the thread that ran it as it was.
    const rpc::Promise<void> promise;
    rpc::Future<void> done;
    std::thread([&] {
      const Context context;
      done = promise.future().then([] {});
    }).join();
    promise.set_value();
    done.wait();
    EXPECT_EQ(rpc::detail::current_context_id(), -1);
  });
}

// RPC-43
TEST_F(DistAutograd, EndsAtItsTimeLimit) {
  lead([] {
    auto x = at::ones(2).requires_grad_();
    {
      const Context context;
      dist_autograd::backward(context.id(), {rpc_sync("worker1", multiply, x, x).sum()}, {.timeout = 20s});
      EXPECT_TRUE(at::equal(get_gradients(context.id()).at(x), 2 * x));
    }
    const Context context;
    const auto y = rpc_sync("worker1", multiply, x, x);
    // Whether somebody will use it nobody knows.
    const auto kept = rpc::remote("worker2", multiply, y, y);
    expect_error([&] { dist_autograd::backward(context.id(), {(y * 2).sum()}, {.timeout = 300ms}); },
                 {str(context.id()), "300 ms", "'worker2'", "contribute to a root"});
  });
}

// RPC-8
TEST_F(DistAutograd, EndsWithNothingLeft) {
  end();
}

}  // namespace lockstep::rpc_autograd_test
