// Compiled modules as units of fully_shard(): each captures its own forward, and its parameters come and go as always.
#include <torch/torch.h>

#include "lockstep/checkpointing/checkpoint.h"
#include "lockstep/fsdp/fully_shard.h"
#include "lockstep/fsdp/state_dict.h"
#include "lockstep/graph/compiled.h"
#include "lockstep/testing/gtest.h"

namespace lockstep::graph_fsdp_test {
namespace {

struct BlockImpl : torch::nn::Module {
  BlockImpl()
      : norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({12})))),
        up(register_module("up", torch::nn::Linear(12, 20))),
        down(register_module("down", torch::nn::Linear(20, 12))) {}
  at::Tensor forward(const at::Tensor& x) { return x + down->forward(at::gelu(up->forward(norm->forward(x)))); }
  torch::nn::LayerNorm norm;
  torch::nn::Linear up;
  torch::nn::Linear down;
};
TORCH_MODULE(Block);

template <class BlockHolder>
struct NetImpl : torch::nn::Module {
  NetImpl() : embed(register_module("embed", torch::nn::Linear(6, 12))) {
    for (int i = 0; i < 3; ++i) blocks.push_back(register_module("block" + std::to_string(i), BlockHolder()));
    head = register_module("head", torch::nn::Linear(12, 3));
  }
  at::Tensor forward(const at::Tensor& x) {
    auto y = embed->forward(x);
    for (auto& block : blocks) y = block->forward(y);
    return head->forward(y);
  }
  torch::nn::Linear embed;
  std::vector<BlockHolder> blocks;
  torch::nn::Linear head = nullptr;
};

/// Rank threads share libtorch's generator: each draws from one of its own.
at::Tensor drawn(at::IntArrayRef sizes, std::uint64_t seed) {
  return at::randn(sizes, at::make_generator<at::CPUGeneratorImpl>(seed));
}

struct Trained {
  std::vector<at::Tensor> values;
  std::vector<double> losses;
};

/// What `with_model(net)` does with a sharded net, on this rank.
template <class BlockHolder, class Body>
Trained trained(const World& world, const FullyShardOptions& given, const std::string& backend, bool accumulates,
                const Body& watch) {
  auto options = given;
  options.mesh = DeviceMesh::from_group(world.group(), "cpu");
  auto net = std::make_shared<NetImpl<BlockHolder>>();
  {
    const torch::NoGradGuard no_grad;
    std::uint64_t seed = 3;
    for (auto& parameter : net->parameters()) parameter.copy_(drawn(parameter.sizes(), seed++) * 0.3);
  }
  for (auto& block : net->blocks) {
    if constexpr (requires { block->set_compile_options({}); }) block->set_compile_options({.backend = backend});
    fully_shard(*block, options);
  }
  auto root = fully_shard(*net, options);
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.01));
  Trained result;
  for (int step = 0; step < 4; ++step) {
    optimizer.zero_grad();
    const auto seed = static_cast<std::uint64_t>(100 * step + world.rank());
    if (accumulates) {
      const auto no_sync = root.no_sync();
      net->forward(drawn({5, 6}, 1000 + seed)).pow(2).mean().backward();
    }
    const auto loss = net->forward(drawn({5, 6}, seed)).pow(2).mean();
    loss.backward();
    result.losses.push_back(loss.template item<double>());
    optimizer.step();
    net->eval();
    {
      const torch::NoGradGuard no_grad;
      result.losses.push_back(net->forward(drawn({5, 6}, 7)).sum().template item<double>());
    }
    net->train();
  }
  for (const auto& parameter : net->parameters()) result.values.push_back(parameter.detach().clone());
  watch(*net);
  return result;
}

void expect_same(const Trained& got, const Trained& expected, const std::string& what) {
  EXPECT_EQ(got.losses, expected.losses) << what;
  ASSERT_EQ(got.values.size(), expected.values.size()) << what;
  for (std::size_t i = 0; i < got.values.size(); ++i) {
    EXPECT_TRUE(at::equal(got.values[i], expected.values[i])) << what << " " << i;
  }
}

const auto kNothing = [](auto& /*net*/) {};

}  // namespace

// FSDP-85
TEST(GraphFsdp, CompiledUnitsTrainAsOthersDo) {
  for (const int world_size : {1, 2, 3}) {
    testing::run_threads_in_gtest({.world_size = world_size}, [](const World& world) {
      const std::map<std::string, FullyShardOptions> modes = {
          {"plain", {}},
          {"resharded", {.reshard_after_forward = true}},
          {"whole until backward", {.reshard_after_forward = false}},
          {"flat", {.use_orig_params = false}},
          {"forced", {.force_sharding = true}},
      };
      for (const auto& [name, options] : modes) {
        for (const bool accumulates : {false, true}) {
          const auto expected = trained<Block>(world, options, "", accumulates, kNothing);
          for (const auto* const backend : {"eager", "autograd"}) {
            const auto got = trained<Compiled<Block>>(world, options, backend, accumulates, [](auto& net) {
              for (auto& block : net.blocks) {
                EXPECT_EQ(block->compiler().captures(), 2) << "with gradients, and for eval";
                EXPECT_EQ(block->compiler().program().parts().size(), 1);
              }
            });
            expect_same(got, expected, name + " " + backend + (accumulates ? " accumulates" : ""));
          }
        }
      }
    });
  }
}

// FSDP-85
TEST(GraphFsdp, CompiledUnitsComputeInThePolicysPrecision) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    FullyShardOptions options;
    options.mp_policy.param_dtype = at::kBFloat16;
    options.mp_policy.reduce_dtype = at::kFloat;
    const auto expected = trained<Block>(world, options, "", false, kNothing);
    for (const auto* const backend : {"eager", "autograd"}) {
      expect_same(trained<Compiled<Block>>(world, options, backend, false, kNothing), expected, backend);
    }
  });
}

// FSDP-85: a unit inside of what is compiled.
TEST(GraphFsdp, UnitsInsideOfACompiledModuleAreGatheredAsItRuns) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    FullyShardOptions options{.mesh = DeviceMesh::from_group(world.group(), "cpu")};
    const auto run = [&](auto net) {
      {
        const torch::NoGradGuard no_grad;
        std::uint64_t seed = 3;
        for (auto& parameter : net->parameters()) parameter.copy_(drawn(parameter.sizes(), seed++) * 0.3);
      }
      for (auto& block : net->blocks) fully_shard(*block, options);
      fully_shard(*net, options);
      for (int step = 0; step < 2; ++step) net->forward(drawn({5, 6}, world.rank())).pow(2).mean().backward();
      std::vector<at::Tensor> gradients;
      for (const auto& parameter : net->parameters()) gradients.push_back(parameter.grad().clone());
      return gradients;
    };
    const auto expected = run(std::make_shared<NetImpl<Block>>());
    const auto got = run(Compiled<NetImpl<Block>>());
    for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(at::equal(got[i], expected[i])) << i;
  });
}

// FSDP-85, FSDP-28: what a unit's forward was for is known, though it is one node.
TEST(GraphFsdp, WeightedBackwardsAndThawedShardsAreThoseOfOtherUnits) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    const auto run = [&](auto block) {
      {
        const torch::NoGradGuard no_grad;
        std::uint64_t seed = 3;
        for (auto& parameter : block->parameters()) parameter.copy_(drawn(parameter.sizes(), seed++) * 0.3);
      }
      auto root = fully_shard(*block, {.mesh = DeviceMesh::from_group(world.group(), "cpu")});
      torch::optim::SGD optimizer(block->parameters(), 0.1);
      std::vector<at::Tensor> values;
      for (int step = 0; step < 6; ++step) {
        for (auto& parameter : block->parameters()) parameter.set_requires_grad(step != 1 && step != 4);
        block->parameters()[2].set_requires_grad(step != 3);
        if (step == 4 || step == 5) {  // nothing is freed in between
          const torch::NoGradGuard no_grad;
          block->forward(drawn({5, 12}, 7));
        }
        block->parameters()[0].set_requires_grad(true);
        optimizer.zero_grad();
        const auto loss = block->forward(drawn({5, 12}, 10 * step + world.rank())).pow(2).mean();
        if (step % 2 == 0) {
          root.backward(loss, world.rank() + 2);
        } else {
          loss.backward();
        }
        for (const auto& parameter : block->parameters()) {
          values.push_back(parameter.grad().defined() ? parameter.grad().clone() : at::zeros({1}));
        }
        optimizer.step();
      }
      return values;
    };
    const auto expected = run(Block());
    for (const auto* const backend : {"eager", "autograd"}) {
      Compiled<Block> block;
      block->set_compile_options({.backend = backend, .max_captures = 20});
      const auto got = run(block);
      for (std::size_t i = 0; i < expected.size(); ++i) {
        EXPECT_TRUE(at::equal(got[i], expected[i])) << backend << ", step " << i / 6 << ", parameter " << i % 6;
      }
    }
  });
}

}  // namespace lockstep::graph_fsdp_test
