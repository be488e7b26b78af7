// Compiled modules under DistributedDataParallel: cut where its buckets end, and trained as without.
#include <torch/torch.h>

#include "lockstep/ddp/default_hooks.h"
#include "lockstep/ddp/distributed_data_parallel.h"
#include "lockstep/graph/compiled.h"
#include "lockstep/join/join.h"
#include "lockstep/testing/gtest.h"

namespace lockstep::graph_ddp_test {
namespace {

struct NetImpl : torch::nn::Module {
  explicit NetImpl(int depth = 6) {
    for (int i = 0; i < depth; ++i) layers.push_back(register_module(std::to_string(i), torch::nn::Linear(16, 16)));
  }
  at::Tensor forward(const at::Tensor& x) {
    auto y = x;
    for (auto& layer : layers) y = at::tanh(layer->forward(y));
    return y;
  }
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Net);

constexpr double kLayerMb = (16 * 16 + 16) * 4.0 / (1 << 20);

/// Rank threads share libtorch's generator: each draws from one of its own.
at::Tensor drawn(at::IntArrayRef sizes, std::uint64_t seed) {
  return at::randn(sizes, at::make_generator<at::CPUGeneratorImpl>(seed));
}

std::vector<at::Tensor> train(DistributedDataParallel<Net>& ddp, int rank, int steps, bool accumulates = false) {
  torch::optim::SGD optimizer(ddp.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    if (accumulates) {
      const auto no_sync = ddp.no_sync();
      ddp(drawn({4, 16}, 1000 + 100 * step + rank)).pow(2).mean().backward();
    }
    ddp(drawn({4, 16}, 100 * step + rank)).pow(2).mean().backward();
    optimizer.step();
  }
  std::vector<at::Tensor> values;
  for (const auto& parameter : ddp.parameters()) values.push_back(parameter.detach().clone());
  return values;
}

template <class Module>
Module filled(Module module) {
  const torch::NoGradGuard no_grad;
  std::uint64_t seed = 3;
  for (auto& parameter : module->parameters()) parameter.copy_(drawn(parameter.sizes(), seed++) * 0.3);
  return module;
}
Net net() {
  return filled(Net());
}

void expect_equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b, const std::string& what) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::allclose(a[i], b[i], 1e-5, 1e-6)) << what << " " << i;
}

}  // namespace

// GRAPH-2, GRAPH-35, GRAPH-38, GRAPH-40
TEST(GraphDdp, TrainsAsWithoutInAllModes) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    const std::map<std::string, DdpOptions> modes = {
        {"plain", {}},
        {"views", {.gradient_as_bucket_view = true}},
        {"unused", {.find_unused_parameters = true}},
        {"static", {.static_graph = true}},
        {"per parameter", {.per_parameter = true}},
    };
    for (const auto& [name, given] : modes) {
      auto options = given;
      if (!options.per_parameter) options.bucket_cap_mb = 2 * kLayerMb;
      DistributedDataParallel<Net> reference(net(), options);
      const bool accumulates = name != "static";
      const auto expected = train(reference, world.rank(), 4, accumulates);
      for (const auto* const backend : {"eager", "autograd"}) {
        for (const bool aligns : {false, true}) {
          if (aligns && options.per_parameter) continue;
          DistributedDataParallel<Net> ddp(net(), options);
          const auto compiler = compile(ddp, {.backend = backend, .aligns_buckets = aligns});
          expect_equal(train(ddp, world.rank(), 4, accumulates), expected, name + backend);
          EXPECT_EQ(compiler->program().parts().size(), options.per_parameter ? 1 : 3) << name;
          if (!options.per_parameter) {
            EXPECT_NE(compiler->program().parts()[1].reason.find("SplitMode::kOff"), std::string::npos);
          }
          if (aligns) {
            EXPECT_EQ(ddp.bucket_plan().buckets().size(), 3);
          }
        }
      }
    }
  });
}

// GRAPH-2
TEST(GraphDdp, MayBeKeptWhole) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    DistributedDataParallel<Net> reference(net(), DdpOptions{.bucket_cap_mb = 2 * kLayerMb});
    const auto expected = train(reference, world.rank(), 2);
    DistributedDataParallel<Net> ddp(net(), DdpOptions{.bucket_cap_mb = 2 * kLayerMb});
    const auto compiler = compile(ddp, {.mode = SplitMode::kOff});
    expect_equal(train(ddp, world.rank(), 2), expected, "whole");
    EXPECT_EQ(compiler->program().parts().size(), 1);
    EXPECT_NE(compiler->program().parts()[0].reason.find("whole"), std::string::npos);
  });
}

// GRAPH-5
TEST(GraphDdp, MayBeCutOnSomeRanksOnly) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    DistributedDataParallel<Net> reference(net(), DdpOptions{.bucket_cap_mb = 2 * kLayerMb});
    const auto expected = train(reference, world.rank(), 3);
    DistributedDataParallel<Net> ddp(net(), DdpOptions{.bucket_cap_mb = 2 * kLayerMb});
    compile(ddp, {.mode = world.rank() == 0 ? SplitMode::kSplit : SplitMode::kOff});
    expect_equal(train(ddp, world.rank(), 3), expected, "one rank cuts");
  });
}

// GRAPH-1, GRAPH-35, GRAPH-39
TEST(GraphDdp, BucketsAreLaunchedWhileEarlierPartsStillCompute) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    // How many gradients are there when the first bucket is launched.
    const auto ready_at_first_launch = [&](SplitMode mode, const std::string& backend) {
      DistributedDataParallel<Net> ddp(net(), DdpOptions{.bucket_cap_mb = 2 * kLayerMb});
      const auto compiler = compile(ddp, {.backend = backend, .mode = mode, .aligns_buckets = true});
      std::atomic<int> ready = 0;
      std::atomic<int> at_launch = -1;
      for (const auto& parameter : ddp.parameters()) {
        parameter.register_hook([&](const at::Tensor& grad) {
          ++ready;
          return grad;
        });
      }
      ddp.register_comm_hook(
          CommHook{.name = "watch", .run = [&, run = allreduce_hook(world.group()).run](GradBucket& bucket) {
                     if (at_launch == -1) at_launch = ready.load();
                     return run(bucket);
                   }});
      ddp(torch::randn({4, 16})).sum().backward();
      EXPECT_EQ(ready, 12);
      return at_launch.load();
    };
    EXPECT_EQ(ready_at_first_launch(SplitMode::kOff, "autograd"), 12) << "one node: all gradients at its end";
    EXPECT_EQ(ready_at_first_launch(SplitMode::kSplit, "autograd"), 4) << "the last part's";
  });
}

// GRAPH-17, GRAPH-40
TEST(GraphDdp, LeavesIgnoredParametersAlone) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    const DdpOptions options{.bucket_cap_mb = kLayerMb, .params_and_buffers_to_ignore = {"5.weight", "5.bias"}};
    DistributedDataParallel<Net> reference(net(), options);
    const auto expected = train(reference, world.rank(), 3);
    DistributedDataParallel<Net> ddp(net(), options);
    const auto compiler = compile(ddp, {.aligns_buckets = true});
    expect_equal(train(ddp, world.rank(), 3), expected, "ignored");
    EXPECT_EQ(compiler->program().buckets().size(), 5);
  });
}

// GRAPH-41
TEST(GraphDdp, WorksInMixedPrecision) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    DdpOptions options{.bucket_cap_mb = 2 * kLayerMb};
    options.mixed_precision = MixedPrecision{.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
    DistributedDataParallel<Net> reference(net(), options);
    const auto expected = train(reference, world.rank(), 3);
    DistributedDataParallel<Net> ddp(net(), options);
    compile(ddp, {.backend = "eager"});
    expect_equal(train(ddp, world.rank(), 3), expected, "bf16");
    DistributedDataParallel<Net> node(net(), options);
    compile(node, {.backend = "autograd"});
    const auto got = train(node, world.rank(), 3);
    for (std::size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(at::allclose(got[i], expected[i], 1e-2, 1e-2)) << i;
  });
}

// GRAPH-40
TEST(GraphDdp, WorksWithUnevenInputs) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    const auto run = [&](bool compiles) {
      DistributedDataParallel<Net> ddp(net(), DdpOptions{.bucket_cap_mb = 2 * kLayerMb});
      if (compiles) compile(ddp);
      torch::optim::SGD optimizer(ddp.parameters(), 0.1);
      {
        Join join({&ddp});
        for (int step = 0; step < 2 + world.rank(); ++step) {
          optimizer.zero_grad();
          ddp(drawn({4, 16}, 10 * step + world.rank())).pow(2).mean().backward();
          optimizer.step();
        }
      }
      std::vector<at::Tensor> values;
      for (const auto& parameter : ddp.parameters()) values.push_back(parameter.detach().clone());
      return values;
    };
    expect_equal(run(true), run(false), "join");
  });
}

struct TwoHeadsImpl : torch::nn::Module {
  TwoHeadsImpl() {
    for (const char* name : {"body", "a", "b"}) register_module(name, torch::nn::Linear(8, 8));
  }
  std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x) {
    const auto layer = [&](const char* name) { return named_children()[name]->as<torch::nn::Linear>(); };
    const auto y = layer("body")->forward(x);
    return {layer("a")->forward(y), layer("b")->forward(y)};
  }
};
TORCH_MODULE(TwoHeads);

// GRAPH-40
TEST(GraphDdp, OutputsMayBeLeftOutOfTheLoss) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    for (const auto* const backend : {"eager", "autograd"}) {
      DistributedDataParallel<TwoHeads> ddp(
          filled(TwoHeads()), DdpOptions{.bucket_cap_mb = 64.0 / (1 << 20), .find_unused_parameters = true});
      compile(ddp, {.backend = backend});
      DistributedDataParallel<TwoHeads> reference(filled(TwoHeads()), DdpOptions{.find_unused_parameters = true});
      for (int step = 0; step < 3; ++step) {
        const auto x = torch::full({2, 8}, world.rank() + step + 1.0);
        for (auto* each : {&ddp, &reference}) {
          each->zero_grad();
          (*each)(x).first.pow(2).sum().backward();
        }
        const auto wanted = reference.module()->named_parameters();
        for (const auto& item : ddp.module()->named_parameters()) {
          const auto& grad = wanted[item.key()].grad();
          // A part that is one node touches all its parameters: unused ones are zero, not undefined.
          if (grad.defined()) {
            EXPECT_TRUE(at::allclose(item.value().grad(), grad)) << backend << item.key();
          } else if (item.value().grad().defined()) {
            EXPECT_EQ(item.value().grad().abs().sum().item<float>(), 0) << backend << item.key();
          }
        }
      }
    }
  });
}

// GRAPH-38
TEST(GraphDdp, CompiledModulesGoWhereModulesGo) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    DistributedDataParallel<Net> reference(net(), DdpOptions{.bucket_cap_mb = 2 * kLayerMb});
    const auto expected = train(reference, world.rank(), 3);
    auto inside = filled(Compiled<Net>());
    DistributedDataParallel<Compiled<Net>> ddp(inside, DdpOptions{.bucket_cap_mb = 2 * kLayerMb});
    EXPECT_EQ(ddp.named_parameters().keys(), reference.named_parameters().keys());
    torch::optim::SGD optimizer(ddp.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      ddp(drawn({4, 16}, 100 * step + world.rank())).pow(2).mean().backward();
      optimizer.step();
    }
    std::vector<at::Tensor> values;
    for (const auto& parameter : ddp.parameters()) values.push_back(parameter.detach().clone());
    expect_equal(values, expected, "Compiled<Net>");
    EXPECT_EQ(inside->compiler().program().parts().size(), 3);
  });
}

struct PairImpl : torch::nn::Module {
  PairImpl() {
    register_module("front", front);
    register_module("back", back);
  }
  at::Tensor forward(const at::Tensor& x) { return back->forward(front->forward(x)); }
  Compiled<Net> front{4};
  Compiled<Net> back{4};
};
TORCH_MODULE(Pair);
struct PlainPairImpl : torch::nn::Module {
  PlainPairImpl() {
    register_module("front", front);
    register_module("back", back);
  }
  at::Tensor forward(const at::Tensor& x) { return back->forward(front->forward(x)); }
  Net front{4};
  Net back{4};
};
TORCH_MODULE(PlainPair);

// GRAPH-10
TEST(GraphDdp, SeveralGraphsAreCutOneByOne) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    const DdpOptions options{.bucket_cap_mb = 2 * kLayerMb};
    DistributedDataParallel<Pair> ddp(filled(Pair()), options);
    DistributedDataParallel<PlainPair> reference(filled(PlainPair()), options);
    for (int step = 0; step < 3; ++step) {
      const auto x = drawn({4, 16}, 10 * step + world.rank());
      ddp.zero_grad();
      reference.zero_grad();
      ddp(x).pow(2).mean().backward();
      reference(x).pow(2).mean().backward();
      const auto wanted = reference.parameters();
      const auto got = ddp.parameters();
      for (std::size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(at::allclose(got[i].grad(), wanted[i].grad())) << i;
    }
    EXPECT_EQ(ddp.module()->front->compiler().program().parts().size(), 2);
    EXPECT_EQ(ddp.module()->back->compiler().program().parts().size(), 2);
  });
}

}  // namespace lockstep::graph_ddp_test
