// Programs of several parts: what backends are shown, what crosses cuts, what errors say.
#include "lockstep/graph/program.h"

#include <sys/stat.h>
#include <torch/torch.h>

#include <cstdlib>
#include <fstream>
#include <map>

#include "lockstep/graph/capture.h"
#include "lockstep/testing/checks.h"

namespace lockstep::graph_program_test {
namespace {

using graph::Graph;
using graph::GraphFunction;
using graph::Program;
using testing::expect_error;
using Tensors = std::vector<at::Tensor>;

struct NetImpl : torch::nn::Module {
  NetImpl() {
    for (int i = 0; i < 3; ++i) {
      convs.push_back(
          register_module("conv" + std::to_string(i), torch::nn::Conv2d(torch::nn::Conv2dOptions(4, 4, 3).padding(1))));
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    auto y = x;
    for (auto& conv : convs) y = at::relu(conv->forward(y));
    return y;
  }
  std::vector<torch::nn::Conv2d> convs;
};
TORCH_MODULE(Net);

Tensors outer_of(const torch::nn::Module& module) {
  Tensors tensors;
  for (const auto& each : graph::outer_tensors(module)) tensors.push_back(each.tensor);
  return tensors;
}

template <class Module>
Graph captured(Module& module, const at::Tensor& x) {
  return graph::capture({x}, graph::outer_tensors(*module),
                        [&](const Tensors& fakes) { return Tensors{module->forward(fakes[0])}; });
}

at::Tensor channels_last(const at::Tensor& x) {
  return x.dim() == 4 ? x.contiguous(at::MemoryFormat::ChannelsLast) : x;
}

}  // namespace

// GRAPH-31, GRAPH-34
TEST(GraphProgram, CompilesPartsForTheStridesThatThoseBeforeReallyGive) {
  Net net;
  const auto x = torch::randn({2, 4, 5, 5});
  const auto expected = net->forward(x);
  for (const bool runs_on_fakes : {true, false}) {
    std::vector<bool> are_last;  // by compiled part: its first input is channels last
    const auto backend = [&](const Graph& part, const Tensors& examples) -> GraphFunction {
      are_last.push_back(examples[0].is_contiguous(at::MemoryFormat::ChannelsLast));
      return [run = graph::backend_named("eager")(part, examples), runs_on_fakes](const Tensors& inputs) {
        TORCH_CHECK(runs_on_fakes || !inputs[0].is_meta(), "only on real tensors");
        Tensors outputs;
        for (const auto& output : run(inputs)) outputs.push_back(channels_last(output));
        return outputs;
      };
    };
    Program program(captured(net, x), graph::SplitOptions{.bucket_bytes_cap = 1}, backend, outer_of(*net));
    ASSERT_EQ(program.parts().size(), 3);
    EXPECT_EQ(are_last,
              (runs_on_fakes ? std::vector<bool>{false, true, true} : std::vector<bool>{false, false, false}));
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(at::allclose(program.run({x}, outer_of(*net))[0], expected, 1e-4, 1e-5));
    EXPECT_EQ(program.recompilations() > 0, !runs_on_fakes);
    EXPECT_TRUE(are_last.back()) << "they are compiled for what comes";
    const auto compiled = are_last.size();
    program.run({x}, outer_of(*net));
    EXPECT_EQ(are_last.size(), compiled) << "and not again and again";
  }
}

// GRAPH-33
TEST(GraphProgram, RefusesFakesAndOtherSizesAtRunTime) {
  Net net;
  const auto x = torch::randn({2, 4, 5, 5});
  const auto refuses = [&](const std::function<Tensors(Tensors)>& change, const std::vector<std::string>& words) {
    const auto backend = [&](const Graph& part, const Tensors& examples) -> GraphFunction {
      return [run = graph::backend_named("eager")(part, examples), &change](const Tensors& inputs) {
        return change(run(inputs));
      };
    };
    Program program(captured(net, x), graph::SplitOptions{.bucket_bytes_cap = 1}, backend, outer_of(*net));
    expect_error([&] { program.run({x}, outer_of(*net)); }, words);
  };
  refuses([](Tensors outputs) { return Tensors{outputs[0].to(at::kMeta)}; }, {"compiled_part_0", "without elements"});
  refuses([](Tensors outputs) { return Tensors{outputs[0].flatten()}; }, {"compiled_part_0", "T[200]"});
  refuses([](Tensors) { return Tensors(); }, {"compiled_part_0", "0 tensors instead of 1"});
}

struct MixedImpl : torch::nn::Module {
  MixedImpl()
      : shared(register_module("shared", torch::nn::Linear(6, 6))),
        other(register_module("other", torch::nn::Linear(6, 6))),
        ids(register_module("ids", torch::nn::Embedding(4, 6))) {}
  at::Tensor forward(const at::Tensor& x) {
    const auto rows = x.size(0);  // baked in; guarded by the size
    auto y = shared->forward(x) + fixed;
    const auto [most, where] = y.max(1, /*keepdim=*/true);  // where is not used
    y = shared->forward(y.view({rows, -1}) - most);
    y = other->forward(y) + fixed;
    return y + ids->forward(picks).sum();
  }
  torch::nn::Linear shared, other;
  torch::nn::Embedding ids;
  at::Tensor fixed = torch::ones({6});
  at::Tensor picks = torch::tensor({1, 2});
};
TORCH_MODULE(Mixed);

// GRAPH-11, GRAPH-25, GRAPH-27
TEST(GraphProgram, ConstantsAndNumbersCrossCuts) {
  Mixed net;
  const auto x = torch::randn({3, 6});
  auto graph = captured(net, x);
  EXPECT_EQ(graph.count(graph::ValueKind::kConstant), 2);
  Program program(graph, graph::SplitOptions{.bucket_bytes_cap = 1}, graph::backend_named("eager"), outer_of(*net));
  ASSERT_EQ(program.parts().size(), 3);
  EXPECT_TRUE(at::equal(program.run({x}, outer_of(*net))[0], net->forward(x)));
  // A layer that is used twice counts once, at its first use.
  std::vector<std::string> names;
  for (const auto& bucket : program.buckets()) names.insert(names.end(), bucket.names.begin(), bucket.names.end());
  EXPECT_EQ(std::count(names.begin(), names.end(), "shared.weight"), 1);
  EXPECT_EQ(program.buckets()[0].names, (std::vector<std::string>{"shared.weight", "shared.bias"}));
  // A part gives what is read, and no more.
  for (const auto& part : program.parts()) EXPECT_EQ(part.part.outputs.size(), 1) << part.part.graph.to_string();
  // Constants are read when it runs.
  net->fixed.fill_(5);
  EXPECT_TRUE(at::equal(program.run({x}, outer_of(*net))[0], net->forward(x)));
}

// GRAPH-30
TEST(GraphProgram, ErrorsSayWhereInTheForwardTheyAre) {
  Mixed net;
  const auto x = torch::randn({3, 6});
  for (const auto* const backend : {"eager", "autograd"}) {
    Program program(captured(net, x), graph::SplitOptions{.bucket_bytes_cap = 1}, graph::backend_named(backend),
                    outer_of(*net));
    net->picks.fill_(9);  // there are four
    expect_error([&] { program.run({x}, outer_of(*net)); }, {"out of range", "aten::embedding", "'ids.weight'"});
    net->picks.fill_(1);
    EXPECT_TRUE(at::equal(program.run({x}, outer_of(*net))[0], net->forward(x)));
  }
}

// GRAPH-20
TEST(GraphProgram, WithoutCutsHandsOverTheWholeGraph) {
  Net net;
  const auto x = torch::randn({2, 4, 5, 5});
  const auto graph = captured(net, x);
  std::string seen;
  const auto backend = [&](const Graph& part, const Tensors& examples) {
    seen = part.to_string();
    return graph::backend_named("eager")(part, examples);
  };
  Program program(graph, graph::SplitOptions{}, backend, outer_of(*net));
  EXPECT_EQ(seen, graph.to_string());
  EXPECT_EQ(program.describe().find("index"), std::string::npos) << "no table of one";
}

// GRAPH-43
TEST(GraphProgram, DumpsATableOfItsBucketsIfThereAreSeveral) {
  torch::nn::Sequential net(torch::nn::Linear(4, 4), torch::nn::Linear(4, 4));
  const auto x = torch::randn({2, 4});
  const auto dumped_with = [&](std::size_t cap) {
    std::map<std::string, std::string> dumped;
    const Program program(captured(net, x), graph::SplitOptions{.bucket_bytes_cap = cap}, graph::backend_named("eager"),
                          outer_of(*net),
                          [&](const std::string& what, const std::string& text) { dumped[what] = text; });
    EXPECT_EQ(dumped.count("part 1"), program.buckets().size() - 1);
    return dumped;
  };
  const auto two = dumped_with(1);
  ASSERT_TRUE(two.contains("buckets"));
  EXPECT_NE(two.at("buckets").find("1.weight"), std::string::npos) << two.at("buckets");
  EXPECT_FALSE(dumped_with(1 << 20).contains("buckets"));
}

// GRAPH-46
TEST(GraphProgram, IsDrawnByGraphviz) {
  const auto graph = graph::capture({torch::randn({2, 2})}, {}, [](const std::vector<at::Tensor>& fakes) {
    return std::vector<at::Tensor>{fakes[0] * 2 + 1};
  });
  const graph::Program program(graph, std::nullopt, graph::backend_named("eager"), {});
  const auto dot = program.to_dot();
  EXPECT_NE(dot.find("aten::mul"), std::string::npos);
  EXPECT_NE(dot.find("cluster_0"), std::string::npos);
  // A program of this name that keeps what it gets.
  std::string folder = ::testing::TempDir() + "lockstep-dot-XXXXXX";
  ASSERT_NE(::mkdtemp(folder.data()), nullptr);
  const std::string before = std::getenv("PATH");
  ::setenv("PATH", folder.c_str(), 1);
  testing::expect_error([&] { graph::save_svg(dot, folder + "/none.svg"); }, {"'dot'", "graphviz", "to_dot()"});
  std::ofstream(folder + "/dot") << "#!/bin/sh\n[ \"$1 $2\" = '-Tsvg -o' ] && /bin/cat > \"$3\"\n";
  ::chmod((folder + "/dot").c_str(), 0700);
  graph::save_svg(dot, folder + "/it's.svg");
  std::ifstream file(folder + "/it's.svg");
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(file), {}), dot);
  testing::expect_error([&] { graph::save_svg(dot, folder + "/missing/x.svg"); }, {"failed to write", "missing/x.svg"});
  ::setenv("PATH", before.c_str(), 1);
  for (const auto* const name : {"/dot", "/it's.svg", ""}) ::remove((folder + name).c_str());
}

}  // namespace lockstep::graph_program_test
