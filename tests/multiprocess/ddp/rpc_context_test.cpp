// DDP inside of contexts of distributed autograd: averages are in the context and equal those of a plain pass, .grad is
// left alone, and what works on .grad is refused by name. Ranks are processes: each has one container of contexts.
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/distributed/autograd/context/container.h>
#include <torch/csrc/distributed/autograd/context/context.h>
#include <torch/csrc/distributed/autograd/engine/dist_engine.h>

#include "lockstep/base/str.h"
#include "lockstep/ddp/default_hooks.h"
#include "tests/support/ddp_models.h"

namespace lockstep::rpc_context_test {
namespace {

using namespace ddp_models;
using testing::expect_error;
using torch::distributed::autograd::ContextPtr;
using torch::distributed::autograd::DistAutogradContainer;
using torch::distributed::autograd::DistEngine;

/// One pass of distributed autograd, on this thread.
class Context {
 public:
  Context() : context_(DistAutogradContainer::getInstance().newContext()) {}
  ~Context() { DistAutogradContainer::getInstance().releaseContext(context_->contextId()); }
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  void backward(const at::Tensor& loss) const {
    DistEngine::getInstance().execute(context_->contextId(), {loss}, false);
  }
  std::size_t size() const { return context_->getGradients().size(); }
  /// Undefined where the context has none.
  std::vector<at::Tensor> gradients_of(const torch::nn::Module& module) const {
    const auto all = context_->getGradients();
    std::vector<at::Tensor> gradients;
    for (const auto& parameter : module.parameters()) {
      gradients.push_back(all.contains(parameter) ? all.at(parameter).clone() : at::Tensor());
    }
    return gradients;
  }

 private:
  const ContextPtr context_;
};

void expect_same_bits(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    ASSERT_EQ(actual[i].defined(), expected[i].defined()) << "tensor " << i;
    if (!actual[i].defined()) continue;
    const auto dense = [](const at::Tensor& tensor) { return tensor.is_sparse() ? tensor.to_dense() : tensor; };
    EXPECT_TRUE(at::equal(dense(actual[i]), dense(expected[i]))) << "tensor " << i << "\n"
                                                                 << actual[i] << "\n"
                                                                 << expected[i];
  }
}

class DdpInContext : public testing::ContinuousTest<DdpInContext> {
 public:
  static testing::RunOptions options() { return {.world_size = 4, .backend = "shm"}; }

 protected:
  void run(const testing::RankBody& body) {
    ContinuousTest::run([&](const World& world) {
      DistAutogradContainer::init(world.rank());
      body(world);
    });
  }
};

// RPC-57, RPC-71
TEST_F(DdpInContext, EqualsAPlainPass) {
  run([](const World& world) {
    at::manual_seed(world.rank());
    DistributedDataParallel ddp(torch::nn::Linear(2, 3), world.group());
    const auto inputs = at::rand({3, 2});
    auto scope = ddp.join(/*divide_by_initial_world_size=*/false);
    for (int i = 0; i < 3; ++i) {
      std::vector<at::Tensor> averages;
      {
        const Context context;
        context.backward(ddp(inputs + i).norm());
        averages = context.gradients_of(ddp);
        EXPECT_EQ(context.size(), 2U);
      }
      for (const auto& parameter : ddp.parameters()) EXPECT_FALSE(parameter.grad().defined());
      ddp(inputs + i).norm().backward();
      expect_same_bits(averages, gradients_of(ddp));
      zero_grads(ddp);
    }
    scope.finish();
  });
}

// RPC-71
TEST_F(DdpInContext, EqualsAPlainPassWithUnevenInputs) {
  run([](const World& world) {
    for (const bool searches : {false, true}) {
      at::manual_seed(world.rank());
      DistributedDataParallel ddp(torch::nn::Linear(2, 3), world.group(), {.find_unused_parameters = searches});
      const int count = world.rank() % 2 == 0 ? 3 : 1;
      ddp.join(/*divide_by_initial_world_size=*/true).run([&] {
        for (int i = 0; i < count; ++i) {
          const auto input = at::rand({3, 2});
          std::vector<at::Tensor> averages;
          {
            const Context context;
            context.backward(ddp(input).norm());
            averages = context.gradients_of(ddp);
          }
          zero_grads(ddp);
          ddp(input).norm().backward();
          expect_same_bits(averages, gradients_of(ddp));
        }
      });
    }
  });
}

TEST_F(DdpInContext, RanksWithoutInputsLeaveTheirGradAlone) {
  run([](const World& world) {
    for (const bool is_view : {false, true}) {
      DistributedDataParallel ddp(mlp({4, 3, 2}), world.group(), {.gradient_as_bucket_view = is_view});
      const auto input = my_rows(random_batch(12, 4, 5), world);
      ddp(input).sum().backward();
      const auto before = gradients_of(ddp);
      ddp.join().run([&] {
        for (int i = 0; i <= world.rank(); ++i) {
          const Context context;
          context.backward(ddp(input * i).pow(2).sum());
        }
      });
      expect_same_bits(gradients_of(ddp), before);
    }
  });
}

/// The hybrid model of trainers and remote parts, these here as well: what they are is not trained.
struct HybridImpl : torch::nn::Module {
  HybridImpl() : fc1(register_module("fc1", linear(2, 2))), fc2(register_module("fc2", linear(3, 1))) {}
  static torch::nn::Linear linear(int64_t in, int64_t out) {
    torch::nn::Linear layer(torch::nn::LinearOptions(in, out).bias(false));
    const at::NoGradGuard no_grad;
    layer->weight.fill_(1);
    layer->weight[0][0] = -1;
    return layer;
  }
  at::Tensor forward(const at::Tensor& dense) {
    const auto sparse = at::full({dense.size(0), 3}, 0.5);
    return fc2->forward(at::relu(net->forward(at::cat({fc1->forward(dense), sparse}, 1))));
  }
  torch::nn::Linear fc1;
  torch::nn::Linear fc2;
  torch::nn::Linear net = linear(5, 3);
};
TORCH_MODULE(Hybrid);

// RPC-70
TEST_F(DdpInContext, TrainersWithFewerMicroBatchesKeepTheirLastAverages) {
  run([](const World& world) {
    std::vector<at::Tensor> dense;
    std::vector<float> values;
    for (const int value : {-1, 1}) {
      for (const int x : {-value, value}) {
        for (const int y : {value, -value}) {
          for (int z = 0; z < 2; ++z) {
            dense.push_back(at::tensor({static_cast<float>(x), static_cast<float>(y)}));
            values.push_back(static_cast<float>(value));
          }
        }
      }
    }
    const auto mine = my_rows(at::stack(dense), world);
    const auto my_values = my_rows(at::tensor(values), world);
    DistributedDataParallel ddp(Hybrid(), world.group());
    const bool has_less = world.rank() < 2;
    for (int round = 0; round < 3; ++round) {
      std::vector<at::Tensor> last;
      ddp.join().run([&] {
        for (int i = 0; i < (has_less ? 1 : 2); ++i) {
          const Context context;
          context.backward((ddp(mine.narrow(0, 2 * i, 2)) * my_values).sum());
          last = context.gradients_of(ddp);
        }
      });
      const auto row = [](std::vector<float> numbers, int64_t rows) { return at::tensor(numbers).view({rows, -1}); };
      expect_same_bits(last, has_less ? std::vector{row({0, 12, 0, 4}, 2), row({0, 14, 14}, 1)}
                                      : std::vector{row({2, -2, -2, 2}, 2), row({7, 0, 0}, 1)});
    }
  });
}

// RPC-72
TEST_F(DdpInContext, AveragesSparseGradients) {
  run([](const World& world) {
    at::manual_seed(world.rank());
    torch::nn::EmbeddingBag bag(torch::nn::EmbeddingBagOptions(10, 3).sparse(true));
    DistributedDataParallel ddp(bag, world.group());
    const auto offsets = at::tensor({0, 4}, at::kLong);
    for (int i = 0; i < 3; ++i) {
      const auto ids = at::randint(0, 10, {10}, at::kLong);
      std::vector<at::Tensor> averages;
      {
        const Context context;
        context.backward(ddp(ids, offsets).sum());
        averages = context.gradients_of(ddp);
        EXPECT_EQ(context.size(), 1U);
        EXPECT_TRUE(averages[0].is_sparse());
      }
      EXPECT_FALSE(bag->weight.grad().defined());
      ddp(ids, offsets).sum().backward();
      expect_same_bits(averages, gradients_of(ddp));
      zero_grads(ddp);
    }
  });
}

// RPC-41
TEST_F(DdpInContext, HooksOnParametersRunBeforeTheAverage) {
  run([](const World& world) {
    const auto input = my_rows(random_batch(12, 4, 5), world);
    DistributedDataParallel ddp(mlp({4, 2}), world.group());
    std::vector<at::Tensor> plain;
    {
      const Context context;
      context.backward(ddp(input).pow(2).sum());
      plain = context.gradients_of(ddp);
    }
    ddp.module()->layers[0]->weight.register_hook([](const at::Tensor& gradient) { return gradient * 2; });
    const Context context;
    context.backward(ddp(input).pow(2).sum());
    const auto doubled = context.gradients_of(ddp);
    expect_same_bits({doubled[0], doubled[1]}, {plain[0] * 2, plain[1]});
  });
}

/// A plain pass, contexts and a plain pass again: all averages are the same, and nobody touches what is another's.
template <class Ddp, class Loss>
void expect_all_passes_equal(Ddp& ddp, const Loss& loss, bool is_context_first = false) {
  zero_grads(ddp);
  std::vector<at::Tensor> of_first;
  if (is_context_first) {
    const Context context;
    context.backward(loss());
    of_first = context.gradients_of(ddp);
  }
  for (int round = 0; round < 3; ++round) {
    loss().backward();
    const auto plain = gradients_of(ddp);
    if (is_context_first) expect_same_bits(of_first, plain);
    std::vector<at::Tensor> kept;
    for (const auto& parameter : ddp.parameters()) kept.push_back(parameter.grad());
    {
      const Context first;
      first.backward(loss());
      expect_same_bits(first.gradients_of(ddp), plain);
      DistAutogradContainer::getInstance().clearCurrentContext();
      const Context second;
      second.backward(loss() * 2);
      expect_same_bits(first.gradients_of(ddp), plain);
      DistAutogradContainer::getInstance().clearCurrentContext();
    }
    expect_same_bits(kept, plain);
    expect_same_bits(gradients_of(ddp), plain);
    zero_grads(ddp);
  }
}

// RPC-57
TEST_F(DdpInContext, WorksWithEveryWayOfReducing) {
  run([](const World& world) {
    const auto input = my_rows(random_batch(12, 4, 5), world);
    const std::map<std::string, DdpOptions> all = {
        {"small buckets", {.bucket_cap_mb = 1e-5}},
        {"gradient_as_bucket_view", {.gradient_as_bucket_view = true}},
        {"static_graph", {.static_graph = true}},
        {"mixed_precision", {.mixed_precision = MixedPrecision{.param_dtype = at::kBFloat16}}},
        {"batched_grad_copy", {.batched_grad_copy = true}},
        {"per_parameter", {.per_parameter = true}},
        {"find_unused_parameters", {.find_unused_parameters = true}}};
    for (const auto& [name, options] : all) {
      for (const bool is_context_first : {false, true}) {
        SCOPED_TRACE(name + (is_context_first ? ", context first" : ""));
        DistributedDataParallel ddp(mlp({4, 3, 2}), world.group(), options);
        expect_all_passes_equal(ddp, [&] { return ddp(input).pow(2).sum().to(at::kFloat); }, is_context_first);
      }
    }
    DistributedDataParallel ddp(mlp({4, 3, 2}), world.group());
    ddp.register_comm_hook(fp16_compress_hook());
    expect_all_passes_equal(ddp, [&] { return ddp(input).pow(2).sum(); });
  });
}

// RPC-57
TEST_F(DdpInContext, ParametersThatSomeRanksOrAllLeaveOutAreAsInAPlainPass) {
  run([](const World& world) {
    const auto input = my_rows(random_batch(12, 4, 5), world);
    for (const auto& [is_static, is_context_first] :
         {std::pair(false, false), std::pair(false, true), std::pair(true, false), std::pair(true, true)}) {
      SCOPED_TRACE(str(is_static ? "static" : "searched", is_context_first ? ", context first" : ""));
      DistributedDataParallel ddp(seeded(Branchy()), world.group(),
                                  {.find_unused_parameters = !is_static, .static_graph = is_static});
      // Only rank 0 uses the left branch, nobody the right one.
      const auto loss = [&] { return ddp(input, world.rank() == 0, false).pow(2).sum(); };
      expect_all_passes_equal(ddp, loss, is_context_first);
      const Context context;
      context.backward(loss());
      EXPECT_EQ(context.size(), 4U) << "the trunk and the left branch, on every rank";
    }
  });
}

TEST_F(DdpInContext, LocalBackwardsAddUpInTheContext) {
  run([](const World& world) {
    const auto input = my_rows(random_batch(12, 4, 5), world);
    DistributedDataParallel ddp(seeded(Branchy()), world.group(), {.find_unused_parameters = true});
    const auto loss = [&](bool is_left) { return ddp(input, is_left, !is_left).pow(2).sum(); };
    const auto add_local = [&](const auto& backward) {
      const auto guard = ddp.no_sync();
      backward(loss(true));
    };
    const auto plain_backward = [](const at::Tensor& of) { of.backward(); };
    add_local(plain_backward);
    loss(false).backward();
    const auto plain = gradients_of(ddp);
    zero_grads(ddp);
    {
      const Context context;
      const auto backward = [&](const at::Tensor& of) { context.backward(of); };
      add_local(backward);
      backward(loss(false));
      expect_same_bits(context.gradients_of(ddp), plain);
    }
    // What one place has added up is not another's: a pass in a context comes in between, and is no part of it.
    add_local(plain_backward);
    {
      const Context context;
      context.backward(loss(false));
      EXPECT_EQ(context.size(), 4U);
    }
    loss(false).backward();
    expect_same_bits(gradients_of(ddp), plain);
  });
}

TEST_F(DdpInContext, OneBackwardMayGoThroughALocalAndASyncedForward) {
  run([](const World& world) {
    const auto input = my_rows(random_batch(12, 4, 5), world);
    DistributedDataParallel ddp(seeded(Branchy()), world.group(), {.find_unused_parameters = true});
    // The local forward's own gradients come before backward reaches the synced one.
    const auto loss = [&] {
      const auto synced = ddp(input, false, true).pow(2).sum();
      const auto guard = ddp.no_sync();
      return synced + ddp(input, true, false).pow(2).sum();
    };
    expect_all_passes_equal(ddp, loss);
  });
}

TEST_F(DdpInContext, RanksThatRunOutGiveWhatTheirContextHasAddedUp) {
  run([](const World& world) {
    const auto input = my_rows(random_batch(12, 4, 5), world);
    DistributedDataParallel ddp(mlp({4, 3, 2}), world.group());
    const auto train = [&](const auto& backward) {
      ddp.join().run([&] {
        // A local backward and a synced one; the odd ranks run out in between.
        {
          const auto guard = ddp.no_sync();
          backward(ddp(input).pow(2).sum());
        }
        if (world.rank() % 2 == 0) backward(ddp(input).sum());
      });
    };
    train([](const at::Tensor& loss) { loss.backward(); });
    const auto plain = gradients_of(ddp);
    zero_grads(ddp);
    const Context context;
    train([&](const at::Tensor& loss) { context.backward(loss); });
    expect_same_bits(context.gradients_of(ddp), plain);
    for (const auto& parameter : ddp.parameters()) EXPECT_FALSE(parameter.grad().defined());
  });
}

TEST_F(DdpInContext, AFailedBackwardIsForgotten) {
  run([](const World& world) {
    const auto input = my_rows(random_batch(12, 4, 5), world);
    DistributedDataParallel ddp(mlp({4, 3, 2}), world.group());
    const auto loss = [&] { return ddp(input).pow(2).sum(); };
    {
      const Context context;
      auto& weight = ddp.module()->layers[0]->weight;
      const auto hook = weight.register_hook([](const at::Tensor& gradient) -> at::Tensor {
        TORCH_CHECK(false, "in the middle of it");
        return gradient;
      });
      expect_error([&] { context.backward(loss()); }, {"in the middle of it"});
      weight.remove_hook(hook);
    }
    expect_all_passes_equal(ddp, loss);
  });
}

TEST_F(DdpInContext, ADestroyedWrapperIsTold) {
  run([](const World& world) {
    auto module = mlp({4, 2});
    at::Tensor loss;
    {
      DistributedDataParallel ddp(module, world.group());
      loss = ddp(random_batch(3, 4, 5)).sum();
    }
    const Context context;
    expect_error([&] { context.backward(loss); }, {"is destroyed"});
  });
}

// ---- what works on .grad ----

/// Refused in forward, and if only backward is in the context there; a plain pass goes on.
template <class Ddp>
void expect_refused(Ddp& ddp, const at::Tensor& input, const std::vector<std::string>& words) {
  {
    const Context context;
    expect_error([&] { ddp(input); }, words);
  }
  {
    const auto loss = ddp(input).sum();
    const Context context;
    expect_error([&] { context.backward(loss); }, words);
  }
  ddp(input).sum().backward();
}

OptimizerPtr sgd(const std::vector<at::Tensor>& parameters) {
  return std::make_shared<torch::optim::SGD>(parameters, 0.1);
}

TEST_F(DdpInContext, RefusesOptimizersInBackward) {
  run([](const World& world) {
    const auto input = my_rows(random_batch(12, 4, 5), world);
    DistributedDataParallel fused(mlp({4, 3, 2}), world.group());
    fused.register_fused_optim(sgd);
    expect_refused(fused, input, {"register_fused_optim", "context", "outside"});

    auto module = mlp({4, 3, 2});
    apply_optimizer_in_backward(sgd, module->parameters());
    {
      const Context context;
      const auto before = module->layers[0]->weight.clone();
      expect_error([&] { context.backward(module->forward(input).sum()); }, {"apply_optimizer_in_backward", "context"});
      EXPECT_TRUE(at::equal(before, module->layers[0]->weight));
    }
    DistributedDataParallel attached(module, world.group());
    attached(input).sum().backward();
    expect_refused(attached, input, {"apply_optimizer_in_backward", "context"});
    remove_optimizers_in_backward(module->parameters());
  });
}

TEST_F(DdpInContext, RefusesDelayedAllReduce) {
  run([](const World& world) {
    const auto input = my_rows(random_batch(12, 4, 5), world);
    auto module = mlp({4, 3, 2});
    DistributedDataParallel ddp(module, world.group(),
                                {.delay_all_reduce_named_params = {{"layer1.bias", module->layers[1]->bias}},
                                 .param_to_hook_all_reduce = module->layers[0]->weight});
    expect_refused(ddp, input, {"delay_all_reduce_named_params", "layer1.bias", "outside"});
  });
}

TEST_F(DdpInContext, RefusesWeightedBackwards) {
  run([](const World& world) {
    const auto input = my_rows(random_batch(12, 4, 5), world);
    DistributedDataParallel ddp(mlp({4, 3, 2}), world.group());
    {
      const Context context;
      const auto loss = ddp(input).sum();
      expect_error([&] { ddp.backward(loss, 2); }, {"backward(loss, weight)", "context"});
    }
    expect_all_passes_equal(ddp, [&] { return ddp(input).sum(); });
  });
}

TEST_F(DdpInContext, RefusesZerosWaysIntoBackward) {
  run([](const World& world) {
    const auto input = my_rows(random_batch(12, 4, 5), world);
    {
      DistributedDataParallel ddp(mlp({4, 3, 2}), world.group());
      ZeroRedundancyOptimizer<torch::optim::SGD> zero(ddp.parameters(), torch::optim::SGDOptions(0.1),
                                                      {.process_group = world.group(), .overlap_with_ddp = true});
      ddp.register_comm_hook(hook_with_zero_step(allreduce_hook(), ddp, zero));
      expect_refused(ddp, input, {"hook_with_zero_step", "context", "outside"});
    }
    DistributedDataParallel ddp(mlp({4, 3, 2}), world.group());
    ZeroRedundancyOptimizer<torch::optim::SGD> zero(ddp.parameters(), torch::optim::SGDOptions(0.1),
                                                    {.stage = ZeroStage::kGradients, .ddp = ddp});
    expect_refused(ddp, input, {"ZeroStage::kGradients", "context", "outside"});
  });
}

TEST_F(DdpInContext, RefusesFullyShardedModules) {
  run([](const World& world) {
    const auto input = my_rows(random_batch(12, 4, 5), world);
    auto module = mlp({4, 3, 2});
    fully_shard(*module, {.mesh = DeviceMesh::from_group(world.group(), "cpu")});
    {
      const Context context;
      expect_error([&] { module->forward(input); }, {"context of distributed autograd", "outside"});
    }
    {
      const auto loss = module->forward(input).sum();
      const Context context;
      expect_error([&] { context.backward(loss); }, {"context of distributed autograd", "outside"});
    }
    module->forward(input).sum().backward();
  });
}

}  // namespace
}  // namespace lockstep::rpc_context_test
