// Modules on other workers, and one optimizer for all of them.
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>

#include "lockstep/base/str.h"
#include "lockstep/rpc/dist_autograd.h"
#include "lockstep/rpc/distributed_optimizer.h"
#include "lockstep/rpc/remote_module.h"
#include "lockstep/rpc/rpc.h"
#include "lockstep/testing/gtest.h"
#include "tests/support/rpc_linear.h"

namespace lockstep::rpc_modules_test {

using rpc::DistributedOptimizer;
using rpc::RemoteModule;
using rpc::rpc_sync;
using testing::expect_error;

struct WordsImpl : torch::nn::Module {
  explicit WordsImpl(std::int64_t size) {
    TORCH_CHECK(size > 0, "no size of ", size);
    weight = register_parameter("weight", at::arange(size, at::kFloat));
    count = register_buffer("count", at::full({1}, 7));
  }
  std::tuple<std::string, std::int64_t, at::Tensor> forward(at::Tensor x, std::int64_t n, std::string word) {
    return {word, n, x * weight};
  }
  at::Tensor weight;
  at::Tensor count;
};

struct ConstWordsImpl : torch::nn::Module {
  at::Tensor forward(at::Tensor x) const { return x + 1; }
};
struct DerivedWordsImpl : ConstWordsImpl {};

const auto const_words = rpc::module_class<ConstWordsImpl>("ConstWords").constructor<>();
const auto derived_words = rpc::module_class<DerivedWordsImpl>("DerivedWords").constructor<>();
const auto words = rpc::module_class<WordsImpl>("Words").constructor<std::int64_t>();
const auto set_weight = rpc::function("set_weight", [](rpc::RRef<torch::nn::LinearImpl> module, at::Tensor weight) {
  const torch::NoGradGuard no_grad;
  module.local_value().weight.copy_(weight);
});
const auto through = rpc::function(
    "through", [](RemoteModule<torch::nn::LinearImpl> module, at::Tensor x) { return module.forward(x); });

void run(int world_size, const std::function<void(int rank)>& body) {
  testing::run_processes_in_gtest({.world_size = world_size, .backend = "gloo"}, [&](const World& world) {
    rpc::init_rpc(str("worker", world.rank()), world.rank(), world.world_size(), {.fail_on_rref_leak = true});
    body(world.rank());
    rpc::shutdown();
  });
}

// RPC-49, RPC-50, RPC-51, RPC-52, RPC-54, RPC-23
TEST(RemoteModules, RunOnTheirWorker) {
  run(3, [](int rank) {
    if (rank != 0) return;
    for (const auto* const place : {"worker1/cpu", "worker1", "rank:1/cpu", "rank:1", "worker0"}) {
      const RemoteModule<WordsImpl> module(place, std::int64_t{4});
      const auto [word, number, product] = module.forward(at::ones(4), 3, "tree");
      EXPECT_EQ(word, "tree");
      EXPECT_EQ(number, 3);
      EXPECT_TRUE(at::equal(product, at::arange(4, at::kFloat)));
      EXPECT_EQ(std::get<1>(module.forward_async(at::ones(4), 5, "x").wait()), 5);
      EXPECT_EQ(module.remote_parameters().size(), 1);
      EXPECT_TRUE(module.is_training());
      module.eval();
      EXPECT_FALSE(module.is_training());
      module.train(true);
      EXPECT_TRUE(module.is_training());
      module.train(false);
      EXPECT_FALSE(module.is_training());
      const auto copy = module.module_rref().to_here();
      EXPECT_TRUE(at::equal(copy->weight, at::arange(4, at::kFloat)));
      EXPECT_TRUE(copy->weight.requires_grad());
      EXPECT_EQ(copy->count.item<std::int64_t>(), 7);
      expect_error([&] { module.parameters(); }, {"no parameters()", "remote_parameters()"});
    }
    EXPECT_TRUE(at::equal(RemoteModule<ConstWordsImpl>("worker1").forward(at::ones(2)), at::full({2}, 2.0)));
    EXPECT_TRUE(at::equal(RemoteModule<DerivedWordsImpl>("worker1").forward(at::ones(2)), at::full({2}, 2.0)));
    const RemoteModule<WordsImpl> broken("worker1", std::int64_t{-1});
    expect_error([&] { broken.forward(at::ones(4), 3, "tree"); }, {"worker1", "Words", "no size of -1"});
    for (const auto* const text :
         {"", "/", "w/", "/cuda:0", "a/b/c", "rank:x", "rank:1x", "rank:-1", "worker1/gpu:x", "cuda:0", "cpu"}) {
      expect_error([&] { const RemoteModule<WordsImpl> module(text, std::int64_t{4}); },
                   {str("'", text, "'"), "worker/device, worker, rank:N/device or rank:N"});
    }
    expect_error([] { const RemoteModule<WordsImpl> module("worker9", std::int64_t{4}); }, {"'worker9'"});
    const RemoteModule<torch::nn::Linear> shared("worker1", std::int64_t{3}, std::int64_t{2});
    const auto x = at::randn({5, 3});
    const auto expected = shared.forward(x);
    EXPECT_TRUE(
        at::equal(rpc_sync("worker2", through,
                           RemoteModule<torch::nn::LinearImpl>::from_module_rref("worker1", shared.module_rref()), x),
                  expected));
  });
}

template <class Optimizer, class Options>
void expect_trains_as_here(const Options& options) {
  const auto make = [] { return torch::nn::Linear(torch::nn::LinearOptions(3, 3).bias(false)); };
  auto first = make();
  auto second = make();
  const RemoteModule<torch::nn::Linear> remote_first("worker1", std::int64_t{3}, std::int64_t{3});
  const RemoteModule<torch::nn::Linear> remote_second("worker2", std::int64_t{3}, std::int64_t{3});
  rpc_sync("worker1", set_weight, remote_first.module_rref(), first->weight.detach());
  rpc_sync("worker2", set_weight, remote_second.module_rref(), second->weight.detach());
  auto parameters = remote_first.remote_parameters();
  for (const auto& each : remote_second.remote_parameters()) parameters.push_back(each);
  DistributedOptimizer<Optimizer> remote_optimizer(parameters, options);
  Optimizer optimizer(std::vector<at::Tensor>{first->weight, second->weight}, options);
  for (int step = 0; step < 3; ++step) {
    const auto x = at::randn({4, 3});
    optimizer.zero_grad();
    second->forward(first->forward(x)).pow(2).sum().backward();
    optimizer.step();
    const dist_autograd::Context context;
    const auto loss = remote_second.forward(remote_first.forward(x)).pow(2).sum();
    dist_autograd::backward(context.id(), {loss});
    remote_optimizer.step(context.id());
    EXPECT_TRUE(at::allclose(remote_first.module_rref().to_here()->weight, first->weight)) << step;
    EXPECT_TRUE(at::allclose(remote_second.module_rref().to_here()->weight, second->weight)) << step;
  }
}

// RPC-45, RPC-46, RPC-47
TEST(DistributedOptimizers, StepAsOneOptimizerHere) {
  run(3, [](int rank) {
    if (rank != 0) return;
    using namespace torch::optim;
    expect_trains_as_here<SGD>(SGDOptions(0.05));
    expect_trains_as_here<SGD>(SGDOptions(0.001).momentum(1).weight_decay(1).nesterov(true));
    expect_trains_as_here<Adagrad>(AdagradOptions(0.05));
    expect_trains_as_here<Adam>(AdamOptions(0.01).amsgrad(true));
    expect_trains_as_here<AdamW>(AdamWOptions(0.05).amsgrad(true));
    expect_trains_as_here<RMSprop>(RMSpropOptions(0.05));
    expect_trains_as_here<optim::Adadelta>(optim::AdadeltaOptions{.rho = 0.95});
    expect_trains_as_here<optim::Adamax>(optim::AdamaxOptions{.lr = 0.05});
    expect_trains_as_here<optim::Rprop>(optim::RpropOptions{.lr = 0.05});
    expect_error([] { DistributedOptimizer<SGD> optimizer({}, SGDOptions(0.1)); }, {"no parameters"});
  });
}

// RPC-53
TEST(RemoteModules, RefuseWhatOnlyModulesHereHave) {
  run(1, [](int /*rank*/) {
    const RemoteModule<WordsImpl> module("worker0", std::int64_t{4});
    const auto refuses = [](const char* name, const std::function<void()>& call, const char* instead) {
      expect_error(call, {str("no ", name, "()"), instead});
    };
    refuses("parameters", [&] { module.parameters(); }, "remote_parameters()");
    refuses("named_parameters", [&] { module.named_parameters(); }, "remote_parameters()");
    refuses("buffers", [&] { module.buffers(); }, "called there");
    refuses("named_buffers", [&] { module.named_buffers(); }, "called there");
    refuses("children", [&] { module.children(); }, "module_rref()");
    refuses("named_children", [&] { module.named_children(); }, "module_rref()");
    refuses("modules", [&] { module.modules(); }, "module_rref()");
    refuses("named_modules", [&] { module.named_modules(); }, "module_rref()");
    refuses("to", [&] { module.to(at::kDouble); }, "remote device");
    refuses("cuda", [&] { module.cuda(); }, "remote device");
    refuses("cpu", [&] { module.cpu(); }, "remote device");
    refuses("to_type", [&] { module.to_type(at::kHalf); }, "in that type");
    refuses("register_buffer", [&] { module.register_buffer("b", at::ones(1)); }, "constructor");
    refuses("register_parameter", [&] { module.register_parameter("p", at::ones(1)); }, "constructor");
    refuses("register_module", [&] { module.register_module("m", 1); }, "constructor");
    refuses("register_forward_hook", [&] { module.register_forward_hook(1); }, "hook inside");
    refuses("register_forward_pre_hook", [&] { module.register_forward_pre_hook(1); }, "hook inside");
    refuses("register_backward_hook", [&] { module.register_backward_hook(1); }, "hook inside");
    refuses("apply", [&] { module.apply(1); }, "called there");
    refuses("state_dict", [&] { module.state_dict(); }, "to_here()");
    refuses("load_state_dict", [&] { module.load_state_dict(1); }, "called there");
    refuses("save", [&] { module.save(1); }, "to_here()");
    refuses("load", [&] { module.load(1); }, "called there");
    refuses("requires_grad_", [&] { module.requires_grad_(false); }, "called there");
    refuses("zero_grad", [&] { module.zero_grad(); }, "context");
    refuses("share_memory", [&] { module.share_memory(); }, "RRef");
  });
}

const auto gradient_of = rpc::function("gradient_of", [](rpc::RRef<at::Tensor> parameter, std::int64_t context) {
  return dist_autograd::get_gradients(context).at(parameter.local_value());
});
const auto set_grad = rpc::function("set_grad", [](rpc::RRef<at::Tensor> parameter, at::Tensor grad) {
  auto& slot = parameter.local_value().mutable_grad();
  std::swap(slot, grad);
  return grad;
});
const auto freeze =
    rpc::function("freeze", [](rpc::RRef<at::Tensor> parameter) { parameter.local_value().set_requires_grad(false); });

// RPC-46, RPC-40
TEST(DistributedOptimizers, UseTheContextsGradientsAlone) {
  run(3, [](int rank) {
    if (rank != 0) return;
    const RemoteModule<torch::nn::Linear> module("worker1", std::int64_t{2}, std::int64_t{2});
    const RemoteModule<torch::nn::Linear> frozen("worker2", std::int64_t{2}, std::int64_t{2});
    const auto weight = module.remote_parameters().at(0);
    const auto still = frozen.remote_parameters().at(0);
    rpc_sync("worker2", freeze, still);
    DistributedOptimizer<torch::optim::SGD> optimizer({weight, still}, torch::optim::SGDOptions(0.5).weight_decay(0.1));
    const auto before = weight.to_here();
    const auto frozen_before = still.to_here();
    rpc_sync("worker1", set_grad, weight, at::full({2, 2}, 100.0));
    rpc_sync("worker2", set_grad, still, at::full({2, 2}, 100.0));
    {
      const dist_autograd::Context context;
      const auto loss = frozen.forward(module.forward(at::ones({1, 2}))).sum();
      dist_autograd::backward(context.id(), {loss});
      const auto gradient = rpc_sync("worker1", gradient_of, weight, context.id());
      optimizer.step(context.id());
      EXPECT_TRUE(at::allclose(weight.to_here(), before - 0.5 * (gradient + 0.1 * before)));
      EXPECT_TRUE(at::equal(still.to_here(), frozen_before)) << "neither .grad nor decay moves it";
      expect_error([&] { optimizer.step(context.id() + 1); }, {str(context.id() + 1)});
    }
    EXPECT_TRUE(at::equal(rpc_sync("worker1", set_grad, weight, at::Tensor()), at::full({2, 2}, 100.0)))
        << ".grad is neither used nor changed";
  });
}

struct DoomedOptions : torch::optim::OptimizerCloneableOptions<DoomedOptions> {
  void serialize(torch::serialize::InputArchive& /*archive*/) override {}
  void serialize(torch::serialize::OutputArchive& /*archive*/) const override {}
};
struct Doomed : torch::optim::Optimizer {
  Doomed(std::vector<at::Tensor> parameters, const DoomedOptions& options)
      : Optimizer({torch::optim::OptimizerParamGroup(std::move(parameters))},
                  std::make_unique<DoomedOptions>(options)) {}
  at::Tensor step(LossClosure /*closure*/ = nullptr) override {
    for (const auto& each : param_groups()[0].params()) {
      TORCH_CHECK(each.grad().defined(), "no gradient was given");
    }
    TORCH_CHECK(false, "the optimizer is doomed");
  }
};

// RPC-45, RPC-46
TEST(DistributedOptimizers, ListEveryWorkerThatFailed) {
  run(3, [](int rank) {
    if (rank == 0) {
      const RemoteModule<torch::nn::Linear> first("worker1", std::int64_t{2}, std::int64_t{2});
      const RemoteModule<torch::nn::Linear> second("worker2", std::int64_t{2}, std::int64_t{2});
      const std::vector<rpc::RRef<at::Tensor>> both = {first.remote_parameters()[0], second.remote_parameters()[0]};
      using Optimizer = DistributedOptimizer<Doomed, DoomedOptions>;
      expect_error([&] { Optimizer optimizer(both); }, {"failed on 2 of 2", "worker 'worker1'", "worker 'worker2'",
                                                        "Doomed is not known", "register_optimizer()"});
    }
    rpc::barrier();
    rpc::register_optimizer<Doomed, DoomedOptions>();
    rpc::barrier();
    if (rank != 0) return;
    const RemoteModule<torch::nn::Linear> first("worker1", std::int64_t{2}, std::int64_t{2});
    const RemoteModule<torch::nn::Linear> second("worker2", std::int64_t{2}, std::int64_t{2});
    DistributedOptimizer<Doomed, DoomedOptions> optimizer(
        {first.remote_parameters()[0], second.remote_parameters()[0]});
    const dist_autograd::Context context;
    dist_autograd::backward(context.id(), {second.forward(first.forward(at::ones({1, 2}))).sum()});
    rpc_sync("worker1", set_grad, first.remote_parameters()[0], at::full({2, 2}, 100.0));
    expect_error([&] { optimizer.step(context.id()); },
                 {"failed on 2 of 2", "worker 'worker1'", "worker 'worker2'", "the optimizer is doomed"});
    EXPECT_TRUE(
        at::equal(rpc_sync("worker1", set_grad, first.remote_parameters()[0], at::Tensor()), at::full({2, 2}, 100.0)))
        << "a failed step leaves .grad alone too";
  });
}

struct AloneOptions : torch::optim::OptimizerCloneableOptions<AloneOptions> {
  void serialize(torch::serialize::InputArchive& /*archive*/) override {}
  void serialize(torch::serialize::OutputArchive& /*archive*/) const override {}
};
struct Alone : torch::optim::Optimizer {
  Alone(std::vector<at::Tensor> parameters, const AloneOptions& options)
      : Optimizer({torch::optim::OptimizerParamGroup(std::move(parameters))}, std::make_unique<AloneOptions>(options)) {
  }
  at::Tensor step(LossClosure /*closure*/ = nullptr) override {
    most = std::max<int>(most, ++running);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    --running;
    return {};
  }
  static inline std::atomic<int> running = 0;
  static inline std::atomic<int> most = 0;
};
const auto most_at_once = rpc::function("most_at_once", [] { return static_cast<std::int64_t>(Alone::most); });

// RPC-46
TEST(DistributedOptimizers, StepOneAfterAnotherOnAWorker) {
  run(3, [](int rank) {
    rpc::register_optimizer<Alone, AloneOptions>();
    rpc::barrier();
    const RemoteModule<torch::nn::Linear> module("worker1", std::int64_t{2}, std::int64_t{2});
    DistributedOptimizer<Alone, AloneOptions> optimizer(module.remote_parameters());
    const dist_autograd::Context context;
    dist_autograd::backward(context.id(), {module.forward(at::ones({1, 2})).sum()});
    rpc::barrier();
    optimizer.step(context.id());
    rpc::barrier();
    if (rank == 0) {
      EXPECT_EQ(rpc_sync("worker1", most_at_once), 1);
    }
    rpc::barrier();
  });
}

struct NestedImpl : torch::nn::Module {
  explicit NestedImpl(std::int64_t size)
      : own(register_parameter("own", at::ones(size))),
        inner(register_module("inner", torch::nn::Linear(torch::nn::LinearOptions(size, size).bias(false)))),
        norm(register_module("norm", torch::nn::BatchNorm1d(size))) {
    tied = register_parameter("tied", own);
  }
  at::Tensor forward(at::Tensor x) { return norm->forward(inner->forward(x * own)); }
  at::Tensor own;
  torch::nn::Linear inner;
  torch::nn::BatchNorm1d norm;
  at::Tensor tied;
};
struct NullImpl : torch::nn::Module {
  at::Tensor forward(at::Tensor x) { return x; }
};
const auto nested_class = rpc::module_class<NestedImpl>("Nested").constructor<std::int64_t>();
const auto null_class = rpc::module_class<NullImpl>("Null").made_by([] { return std::shared_ptr<NullImpl>(); });
const auto change = rpc::function("change", [](rpc::RRef<NestedImpl> module) {
  auto& nested = module.local_value();
  nested.to(at::kDouble);
  nested.norm->eval();
  nested.norm->running_mean.fill_(9);
  nested.inner->weight.set_requires_grad(false);
});
const auto place_of = rpc::function("place_of", [](RemoteModule<NestedImpl> module) { return module.remote_device(); });

// RPC-23, RPC-49, RPC-51, RPC-52, RPC-54
TEST(RemoteModules, AreCopiedAsTheyAre) {
  run(3, [](int rank) {
    if (rank != 0) return;
    const RemoteModule<NestedImpl> module("worker1", std::int64_t{3});
    EXPECT_EQ(module.remote_parameters().size(), 4) << "a tied parameter comes once";
    EXPECT_EQ(module.remote_parameters(/*recurse=*/false).size(), 1);
    EXPECT_EQ(rpc_sync("worker2", place_of, module), "worker1");
    {
      const dist_autograd::Context context;
      EXPECT_NE(module.forward_async(at::ones({2, 3})).wait().grad_fn(), nullptr);
    }
    rpc_sync("worker1", change, module.module_rref());
    const auto copy = module.module_rref().to_here();
    EXPECT_TRUE(copy->is_training());
    EXPECT_FALSE(copy->norm->is_training());
    EXPECT_TRUE(at::equal(copy->norm->running_mean, at::full({3}, 9.0, at::kDouble)));
    EXPECT_EQ(copy->inner->weight.scalar_type(), at::kDouble);
    EXPECT_EQ(copy->norm->running_mean.scalar_type(), at::kDouble);
    EXPECT_FALSE(copy->inner->weight.requires_grad());
    EXPECT_TRUE(copy->own.requires_grad());
    const auto x = at::randn({4, 3}, at::kDouble);
    EXPECT_TRUE(at::allclose(copy->forward(x), module.forward(x)));
    const RemoteModule<NullImpl> null("worker1");
    expect_error([&] { null.forward(at::ones(1)); }, {"worker1", "returned null"});
  });
}

}  // namespace lockstep::rpc_modules_test
