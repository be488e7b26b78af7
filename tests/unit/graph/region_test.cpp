// Checkpoints inside of a forward that is captured: one node each.
#include <torch/torch.h>

#include "lockstep/checkpointing/checkpoint.h"
#include "lockstep/graph/compiled.h"
#include "lockstep/testing/checks.h"

namespace lockstep::graph_region_test {
namespace {

using testing::expect_error;

struct BlocksImpl : torch::nn::Module {
  BlocksImpl() {
    for (int i = 0; i < 3; ++i) layers.push_back(register_module(std::to_string(i), torch::nn::Linear(8, 8)));
  }
  at::Tensor forward(const at::Tensor& x) {
    auto y = layers[0]->forward(x).relu();
    const CheckpointOptions options{.context_fn = [this](bool is_recompute) {
      recomputations += is_recompute ? 1 : 0;
      return std::shared_ptr<void>();
    }};
    const auto [sum, unchanged] = checkpoint(
        options,
        [this](const at::Tensor& in, double scale) {
          const auto inner = checkpoint([this](const at::Tensor& t) { return layers[1]->forward(t).tanh(); }, in);
          return std::pair(at::dropout(inner * scale, 0.3, is_training()) + layers[1]->forward(in), in);
        },
        y, 1.5);
    return layers[2]->forward(sum + unchanged);
  }
  std::vector<torch::nn::Linear> layers;
  int recomputations = 0;
};
TORCH_MODULE(Blocks);

graph::Graph captured(BlocksImpl& module, bool keeps_regions) {
  return graph::capture(
      {torch::randn({2, 8})}, graph::outer_tensors(module),
      [&](const std::vector<at::Tensor>& fakes) { return std::vector<at::Tensor>{module.forward(fakes[0])}; },
      {.keeps_regions = keeps_regions});
}

}  // namespace

// GRAPH-23
TEST(GraphRegions, AreCheckpointsInEveryRun) {
  for (const auto* const backend : {"eager", "autograd"}) {
    torch::manual_seed(1);
    Blocks plain;
    torch::manual_seed(1);
    Compiled<Blocks> compiled;
    compiled->set_compile_options({.backend = backend});
    for (int step = 0; step < 3; ++step) {
      const auto a = torch::full({2, 8}, 0.3 + step).requires_grad_();
      const auto b = a.detach().clone().requires_grad_();
      torch::manual_seed(step);
      const auto expected = plain->forward(a);
      torch::manual_seed(step);
      const auto got = compiled->forward(b);
      EXPECT_TRUE(at::equal(expected, got));
      plain->zero_grad();
      compiled->zero_grad();
      expected.pow(2).sum().backward();
      EXPECT_EQ(compiled->recomputations, step) << backend << ": nothing is recomputed before backward";
      got.pow(2).sum().backward();
      EXPECT_EQ(compiled->recomputations, step + 1) << backend;
      EXPECT_TRUE(at::equal(a.grad(), b.grad()));
      for (const auto& item : compiled->named_parameters()) {
        EXPECT_TRUE(at::equal(item.value().grad(), plain->named_parameters()[item.key()].grad())) << item.key();
      }
    }
    const torch::NoGradGuard no_grad;
    compiled->eval();
    plain->eval();
    EXPECT_TRUE(at::equal(compiled->forward(torch::ones({2, 8})), plain->forward(torch::ones({2, 8}))));
  }
}

// GRAPH-23
TEST(GraphRegions, CountTheParametersInside) {
  Blocks module;
  const auto graph = captured(*module, /*keeps_regions=*/true);
  const auto is_region = [](const graph::Node& node) { return node.region != nullptr; };
  ASSERT_EQ(std::count_if(graph.nodes.begin(), graph.nodes.end(), is_region), 1);
  const auto& region = *std::find_if(graph.nodes.begin(), graph.nodes.end(), is_region);
  EXPECT_EQ(region.name(), "checkpoint()");
  EXPECT_EQ(region.makes.size(), 1) << "what goes through unchanged is no result of it";
  EXPECT_EQ(region.reads.size(), 3) << "its input and two parameters, though used twice";
  EXPECT_TRUE(region.is_random);
  EXPECT_EQ(std::count_if(region.region->body.nodes.begin(), region.region->body.nodes.end(), is_region), 1)
      << "nested";
  EXPECT_NE(graph.to_string().find("checkpoint()("), std::string::npos) << graph.to_string();
  EXPECT_NE(graph.to_string().find(" operators\n"), std::string::npos);

  const auto buckets = graph::plan_split(graph, {.bucket_bytes_cap = 64, .first_bucket_cap = 64});
  ASSERT_EQ(buckets.size(), 3);
  EXPECT_EQ(buckets[1].names, (std::vector<std::string>{"1.weight", "1.bias"}));
}

// GRAPH-22
TEST(GraphRegions, AreRefusedWhereCutsAreWantedUnlessKept) {
  Blocks module;
  expect_error([&] { captured(*module, /*keeps_regions=*/false); },
               {"checkpoint()", "behind '0.", "keeps_regions", "SplitMode::kOff", "overlap", "around the compiled"});
}

struct OddRegionImpl : torch::nn::Module {
  explicit OddRegionImpl(std::string kind)
      : kind(std::move(kind)), layer(register_module("layer", torch::nn::Linear(4, 4))) {
    count = register_buffer("count", torch::zeros({1}));
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor leaked;
    const auto y = checkpoint(
        [&](const at::Tensor& in) {
          if (kind == "writes") count.add_(1);
          leaked = layer->forward(in);
          return leaked.relu();
        },
        x);
    return kind == "leaks" ? y + leaked : y;
  }
  std::string kind;
  torch::nn::Linear layer;
  at::Tensor count;
};
TORCH_MODULE(OddRegion);

// GRAPH-23
TEST(GraphRegions, WriteToNothingOutsideAndHideNothing) {
  const auto refuses = [](const char* kind, const std::vector<std::string>& words) {
    Compiled<OddRegion> model(kind);
    expect_error([&] { model->forward(torch::ones({2, 4})); }, words);
  };
  refuses("writes", {"aten::add_", "checkpoint()", "'count'", "around the compiled module"});
  refuses("leaks", {"inside of a checkpoint()", "Return it"});
}

// GRAPH-36
TEST(GraphRegions, RunAsTheyAreInABackendThatHasNone) {
  torch::manual_seed(1);
  Compiled<Blocks> compiled;
  compiled->eval();
  compiled->set_compile_options({.backend = "executor"});
  const auto y = compiled->forward(torch::ones({2, 8}));
  EXPECT_FALSE(compiled->compiler().program().parts()[0].is_compiled);
  torch::manual_seed(1);
  Blocks plain;
  plain->eval();
  EXPECT_TRUE(at::equal(plain->forward(torch::ones({2, 8})), y));
}

}  // namespace lockstep::graph_region_test
