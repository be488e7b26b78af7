// Where a captured forward is cut, and what its parts are.
#include "lockstep/graph/split.h"

#include <torch/torch.h>

#include <numeric>
#include <random>

#include "lockstep/graph/backends.h"
#include "lockstep/graph/capture.h"
#include "lockstep/testing/checks.h"

namespace lockstep::graph_split_test {
namespace {

using graph::Bucket;
using graph::extract_part;
using graph::Graph;
using graph::plan_split;
using graph::SplitOptions;
using testing::expect_error;

constexpr std::size_t kLinear = 8 * 8 * 4 + 8 * 4;  // bytes of a Linear(8, 8)

torch::nn::Sequential stack(int depth) {
  torch::nn::Sequential model;
  for (int i = 0; i < depth; ++i) {
    model->push_back(torch::nn::Linear(8, 8));
    model->push_back(torch::nn::ReLU());
  }
  return model;
}

template <class Module>
Graph captured(Module& module, const at::Tensor& x) {
  return graph::capture({x}, graph::outer_tensors(*module), [&](const std::vector<at::Tensor>& fakes) {
    return std::vector<at::Tensor>{module->forward(fakes[0])};
  });
}

std::vector<std::size_t> sizes_of(const std::vector<Bucket>& buckets) {
  std::vector<std::size_t> sizes;
  for (const auto& bucket : buckets) sizes.push_back(bucket.bytes);
  return sizes;
}

/// All nodes once, in order.
void expect_whole(const Graph& graph, const std::vector<Bucket>& buckets) {
  std::size_t next = 0;
  for (const auto& bucket : buckets) {
    for (const auto node : bucket.nodes) EXPECT_EQ(node, next++);
  }
  EXPECT_EQ(next, graph.nodes.size());
}

/// Runs the parts one after another.
std::vector<at::Tensor> run_parts(const Graph& graph, const std::vector<Bucket>& buckets,
                                  const std::vector<at::Tensor>& inputs) {
  std::vector<at::Tensor> environment(graph.values.size());
  for (std::size_t i = 0; i < graph.inputs.size(); ++i) environment[graph.inputs[i]] = inputs[i];
  for (const auto& bucket : buckets) {
    const auto part = extract_part(graph, bucket.nodes);
    std::vector<at::Tensor> arguments;
    for (const auto id : part.inputs) {
      EXPECT_TRUE(environment[id].defined()) << "part reads " << graph.values[id].name << " before it is made";
      arguments.push_back(environment[id]);
    }
    const auto outputs = graph::run_graph(part.graph, arguments);
    for (std::size_t i = 0; i < outputs.size(); ++i) environment[part.outputs[i]] = outputs[i];
  }
  std::vector<at::Tensor> results;
  for (const auto& id : graph.outputs) results.push_back(id ? environment[*id] : at::Tensor());
  return results;
}

}  // namespace

// GRAPH-6, GRAPH-12, GRAPH-13, GRAPH-21, GRAPH-47
TEST(GraphSplit, ClosesBucketsAtTheirCaps) {
  auto model = stack(6);
  const auto graph = captured(model, torch::randn({2, 8}));
  ASSERT_EQ(graph.count(graph::ValueKind::kInput), 1);
  ASSERT_EQ(graph.count(graph::ValueKind::kParameter), 12);
  EXPECT_EQ(graph.values[graph.inputs[1]].name, "0.weight");
  // Two layers fill a bucket, one the first.
  const auto buckets = plan_split(graph, {.bucket_bytes_cap = 2 * kLinear, .first_bucket_cap = kLinear});
  expect_whole(graph, buckets);
  EXPECT_EQ(sizes_of(buckets), (std::vector<std::size_t>{kLinear, 2 * kLinear, 2 * kLinear, kLinear}));
  EXPECT_EQ(buckets[3].names, (std::vector<std::string>{"10.weight", "10.bias"}));
  EXPECT_EQ(buckets[0].names, (std::vector<std::string>{"0.weight", "0.bias"}));
  EXPECT_EQ(buckets[1].parameters.size(), 4);
  // An exact fit closes; a byte more does not.
  EXPECT_EQ(plan_split(graph, {.bucket_bytes_cap = kLinear}).size(), 6);
  EXPECT_EQ(plan_split(graph, {.bucket_bytes_cap = kLinear + 1}).size(), 3);
  // A large weight overshoots; it is not cut.
  EXPECT_EQ(plan_split(graph, {.bucket_bytes_cap = 1}).size(), 6);
  EXPECT_EQ(plan_split(graph).size(), 1) << "all of it is less than the first cap";
}

// GRAPH-3
TEST(GraphSplit, RefusesCapsThatCannotBe) {
  auto model = stack(1);
  const auto graph = captured(model, torch::randn({2, 8}));
  expect_error([&] { plan_split(graph, {.bucket_bytes_cap = 0}); }, {"0"});
  expect_error([&] { plan_split(graph, {.bucket_bytes_cap = 100, .first_bucket_cap = 0}); }, {"0 bytes", "100"});
  expect_error([&] { plan_split(graph, {.bucket_bytes_cap = 100, .first_bucket_cap = 200}); }, {"200", "100"});
  // The default of the first is never above the cap.
  EXPECT_EQ(plan_split(graph, {.bucket_bytes_cap = 10}).size(), 1);
}

struct TiedImpl : torch::nn::Module {
  TiedImpl()
      : embedding(register_module("embedding", torch::nn::Embedding(10, 8))),
        middle(register_module("middle", torch::nn::Linear(8, 8))) {}
  at::Tensor forward(const at::Tensor& ids) {
    return at::matmul(at::relu(middle->forward(embedding->forward(ids))), embedding->weight.t());
  }
  torch::nn::Embedding embedding;
  torch::nn::Linear middle;
};
TORCH_MODULE(Tied);

// GRAPH-14, GRAPH-15, GRAPH-16
TEST(GraphSplit, CountsAParameterOnceWhereItsGradientCompletes) {
  Tied model;
  const auto graph = captured(model, torch::randint(10, {3}));
  const auto buckets = plan_split(graph, {.bucket_bytes_cap = 1});
  expect_whole(graph, buckets);
  std::vector<std::string> names;
  for (const auto& bucket : buckets) names.insert(names.end(), bucket.names.begin(), bucket.names.end());
  EXPECT_EQ(std::count(names.begin(), names.end(), "embedding.weight"), 1);
  EXPECT_EQ(buckets.front().names, std::vector<std::string>{"embedding.weight"}) << "at the lookup, not at the head";
  EXPECT_EQ(buckets.front().bytes, 10 * 8 * 4);
}

struct CatImpl : torch::nn::Module {
  CatImpl() {
    a = register_parameter("a", torch::randn({8, 4}));
    b = register_parameter("b", torch::randn({8, 4}));
    whole = torch::randn({100, 8}).requires_grad_();
    view = register_parameter("view", whole.detach().slice(0, 0, 8).requires_grad_());
  }
  at::Tensor forward(const at::Tensor& x) { return x.matmul(at::cat({a, b}, 1)).matmul(view); }
  at::Tensor a, b, view, whole;
};
TORCH_MODULE(Cat);

// GRAPH-14, GRAPH-15
TEST(GraphSplit, CountsParametersInListsAndTheElementsOfViews) {
  Cat model;
  const auto graph = captured(model, torch::randn({2, 8}));
  const auto buckets = plan_split(graph, {.bucket_bytes_cap = 1});
  ASSERT_EQ(buckets.size(), 2);
  EXPECT_EQ(sizes_of(buckets), (std::vector<std::size_t>{2 * 8 * 4 * 4, 8 * 8 * 4}));
}

// GRAPH-17
TEST(GraphSplit, PlacesIgnoredParametersWithoutCountingThem) {
  auto model = stack(4);
  const auto graph = captured(model, torch::randn({2, 8}));
  SplitOptions options{.bucket_bytes_cap = kLinear};
  EXPECT_EQ(plan_split(graph, options).size(), 4);
  options.ignored = {"6.weight", "6.bias"};
  const auto buckets = plan_split(graph, options);
  expect_whole(graph, buckets);
  EXPECT_EQ(buckets.size(), 3);
  EXPECT_EQ(buckets.back().names, (std::vector<std::string>{"4.weight", "4.bias"}));
  // Nothing to count: one part.
  for (auto& parameter : model->parameters()) parameter.set_requires_grad(false);
  EXPECT_EQ(plan_split(captured(model, torch::randn({2, 8})), options).size(), 1);
}

struct PreambleImpl : torch::nn::Module {
  PreambleImpl() : layer(register_module("layer", torch::nn::Linear(8, 8))) {
    other = register_module("other", torch::nn::Linear(8, 8));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto scaled = ((x * 2) + 1).sin();
    return other->forward(layer->forward(scaled));
  }
  torch::nn::Linear layer;
  torch::nn::Linear other{nullptr};
};
TORCH_MODULE(Preamble);

// GRAPH-19
TEST(GraphSplit, PutsWhatComesBeforeTheFirstParameterToItsNeighbour) {
  Preamble model;
  const auto graph = captured(model, torch::randn({2, 8}));
  const auto buckets = plan_split(graph, {.bucket_bytes_cap = 1});
  expect_whole(graph, buckets);
  ASSERT_EQ(buckets.size(), 2);
  EXPECT_EQ(buckets[0].nodes.front(), 0);
  EXPECT_EQ(buckets[0].names, (std::vector<std::string>{"layer.weight", "layer.bias"}));
}

struct InPlaceImpl : torch::nn::Module {
  explicit InPlaceImpl(int kind) : kind(kind) {
    for (int i = 0; i < 3; ++i) layers.push_back(register_module(std::to_string(i), torch::nn::Linear(8, 8)));
  }
  at::Tensor forward(const at::Tensor& x) {
    auto y = layers[0]->forward(x);
    if (kind == 0) {
      y.relu_();
      y = layers[1]->forward(y);
      y.sigmoid_();
      return layers[2]->forward(y);
    }
    // A view that is written through its base, after a layer came between.
    const auto view = y.narrow(1, 0, 4);
    auto z = layers[1]->forward(x * 2);
    y.mul_(3);
    return layers[2]->forward(z + y) + view.sum();
  }
  int kind;
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(InPlace);

// GRAPH-18, GRAPH-28, GRAPH-44
TEST(GraphSplit, DoesNotCutThroughMemoryThatIsWritten) {
  for (const int kind : {0, 1}) {
    InPlace model(kind);
    const auto x = torch::randn({2, 8});
    const auto graph = captured(model, x);
    const auto buckets = plan_split(graph, {.bucket_bytes_cap = 1});
    expect_whole(graph, buckets);
    for (const auto& bucket : buckets) {
      const auto part = extract_part(graph, bucket.nodes);
      for (const auto& node : part.graph.nodes) {
        for (const auto id : node.writes) {
          EXPECT_EQ(std::count(part.graph.inputs.begin(), part.graph.inputs.end(), id), 0)
              << "a part writes to what another has made";
        }
      }
    }
    EXPECT_EQ(buckets.size(), kind == 0 ? 3 : 2);
    if (kind == 1) {
      EXPECT_GT(buckets[0].extra_nodes, 0);
      EXPECT_NE(graph::bucket_table(buckets).find("extra ops"), std::string::npos);
    }
    std::vector<at::Tensor> inputs = {x};
    for (const auto& outer : graph::outer_tensors(*model)) inputs.push_back(outer.tensor);
    EXPECT_TRUE(at::equal(run_parts(graph, buckets, inputs)[0], model->forward(x)));
  }
}

// GRAPH-28
TEST(GraphSplit, DoesNotCutBetweenInputsThatShareMemory) {
  InPlace model(0);
  const auto buckets_for = [&](const at::Tensor& base, const at::Tensor& other) {
    const auto graph =
        graph::capture({base, other}, graph::outer_tensors(*model), [&](const std::vector<at::Tensor>& fakes) {
          const auto y = model->layers[1]->forward(model->layers[0]->forward(fakes[1]));
          fakes[0].mul_(3);
          return std::vector<at::Tensor>{model->layers[2]->forward(y + fakes[0])};
        });
    return plan_split(graph, {.bucket_bytes_cap = 1}).size();
  };
  const auto x = torch::randn({2, 8});
  EXPECT_EQ(buckets_for(x, torch::randn({2, 8})), 3);
  EXPECT_EQ(buckets_for(x, x.view({2, 8})), 2) << "what is read is written through the other one";
  const auto wide = torch::randn({4, 8});
  EXPECT_EQ(buckets_for(wide.narrow(0, 0, 2), wide.narrow(0, 1, 2)), 2);
}

// GRAPH-24, GRAPH-26
TEST(GraphSplit, PartsReadWhatEarlierOnesMadeAndReturnWhatIsNeeded) {
  auto model = stack(4);
  const auto x = torch::randn({2, 8});
  const auto parameter = model->parameters()[0];
  const auto fixed = torch::ones({2, 8});
  const auto graph = graph::capture({x}, graph::outer_tensors(*model), [&](const std::vector<at::Tensor>& fakes) {
    const auto y = model->forward(fakes[0]);
    // The same value twice, an input, a parameter, a constant, none.
    return std::vector<at::Tensor>{y, y, fakes[0], parameter, y + fixed, at::Tensor()};
  });
  EXPECT_EQ(graph.count(graph::ValueKind::kConstant), 1);
  std::vector<at::Tensor> inputs = {x};
  for (const auto& outer : graph::outer_tensors(*model)) inputs.push_back(outer.tensor);
  inputs.push_back(fixed);
  const auto buckets = plan_split(graph, {.bucket_bytes_cap = kLinear});
  EXPECT_EQ(buckets.size(), 4);
  const auto outputs = run_parts(graph, buckets, inputs);
  const auto y = model->forward(x);
  EXPECT_TRUE(at::equal(outputs[0], y));
  EXPECT_TRUE(outputs[0].is_same(outputs[1]));
  EXPECT_TRUE(outputs[2].is_same(x));
  EXPECT_TRUE(outputs[3].is_same(parameter));
  EXPECT_TRUE(at::equal(outputs[4], y + fixed));
  EXPECT_FALSE(outputs[5].defined());
  const auto middle = extract_part(graph, buckets[1].nodes);
  EXPECT_EQ(middle.inputs.size(), 3) << "activation, weight, bias";
  EXPECT_EQ(middle.outputs.size(), 1);
}

// GRAPH-24, GRAPH-29
TEST(GraphSplit, AnywhereGivesTheSameBits) {
  for (int seed = 0; seed < 30; ++seed) {
    std::mt19937 random(seed);
    torch::manual_seed(seed);
    auto model = stack(3);
    const auto x = torch::randn({4, 8});
    // Random operators on what is there so far: views, writes, several uses, random numbers.
    const auto body = [&](const at::Tensor& input) {
      std::mt19937 choices(seed);
      std::vector<at::Tensor> values = {input};
      for (int i = 0; i < 25; ++i) {
        auto& v = values[choices() % values.size()];
        const auto& w = values[choices() % values.size()];
        switch (choices() % 8) {
          case 0:
            values.push_back(v + w.sum());
            break;
          case 1:
            values.push_back(v.reshape({4, -1}).tanh());
            break;
          case 2:
            values.push_back(at::dropout(v, 0.3, true));
            break;
          case 3:
            values.push_back(v.slice(0, 0, 2).repeat({2, 1}));
            break;
          case 4:
            values.push_back((v * 1).mul_(0.5));
            break;
          case 5:
            values.push_back(model[2 * (choices() % 3)]->as<torch::nn::Linear>()->forward(v));
            break;
          case 6: {
            auto copy = v.clone();
            const auto view = copy.narrow(1, 0, 4);
            view.add_(w.mean());
            values.push_back(copy);
            break;
          }
          default:
            values.push_back(at::cat({v, w}).sum(0, true).expand({4, 8}));
        }
      }
      return std::vector<at::Tensor>{values.back(), values[values.size() / 2]};
    };
    const auto graph =
        graph::capture({x}, graph::outer_tensors(*model), [&](const auto& fakes) { return body(fakes[0]); });
    std::vector<at::Tensor> inputs = {x};
    for (const auto& outer : graph::outer_tensors(*model)) inputs.push_back(outer.tensor);
    // Cuts at random places, whatever the buckets say.
    std::vector<Bucket> buckets(1);
    for (std::size_t n = 0; n < graph.nodes.size(); ++n) {
      if (n > 0 && random() % 3 == 0) buckets.emplace_back();
      buckets.back().nodes.push_back(n);
    }
    torch::manual_seed(5);
    const auto expected = body(x);
    torch::manual_seed(5);
    const auto got = run_parts(graph, buckets, inputs);
    for (std::size_t i = 0; i < expected.size(); ++i)
      EXPECT_TRUE(at::equal(got[i], expected[i])) << seed << graph.to_string();
  }
}

// GRAPH-42, GRAPH-43, GRAPH-45, GRAPH-46
TEST(GraphSplit, ShowsBucketsAndGraphs) {
  auto model = stack(2);
  const auto graph = captured(model, torch::randn({2, 8}));
  const auto buckets = plan_split(graph, {.bucket_bytes_cap = kLinear});
  EXPECT_EQ(graph::bucket_table(buckets),
            "index  bytes  parameter\n"
            "0      288    2.weight\n"
            "              2.bias\n"
            "1      288    0.weight\n"
            "              0.bias\n");
  EXPECT_NE(graph.to_string().find("aten::addmm(0.bias, x0, "), std::string::npos) << graph.to_string();
  EXPECT_NE(graph.to_dot({0, 0, 0, 1, 1, 1}).find("cluster_1"), std::string::npos);
  EXPECT_EQ(graph::describe({torch::ones({2, 3}), at::Tensor(), torch::ones({})}), "(T[2, 3], none, T[])");
}

// GRAPH-27
TEST(GraphSplit, PartsHaveOutputsThatSomebodyReads) {
  const auto graph = graph::capture({torch::randn({2, 2})}, {}, [](const std::vector<at::Tensor>& fakes) {
    const auto used = fakes[0] * 2;
    const auto unread = used + 1;
    return std::vector<at::Tensor>{used - 1};
  });
  ASSERT_EQ(graph.nodes.size(), 3);
  std::vector<Bucket> buckets(2);
  buckets[0].nodes = {0, 1};
  buckets[1].nodes = {2};
  const auto parts = graph::extract_parts(graph, buckets);
  EXPECT_EQ(parts[0].outputs, graph.nodes[0].makes) << "what nobody reads is dropped";
  buckets.resize(3);
  buckets[0].nodes = {0};
  buckets[1].nodes = {1};
  buckets[2].nodes = {2};
  expect_error([&] { graph::extract_parts(graph, buckets); }, {"part 1 of 3 has no output"});
}

struct NormedImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    {
      const torch::NoGradGuard no_grad;
      second->weight.div_(second->weight.norm());
    }
    return second->forward(first->forward(x).tanh());
  }
  torch::nn::Linear first = register_module("first", torch::nn::Linear(8, 8));
  torch::nn::Linear second = register_module("second", torch::nn::Linear(8, 8));
};

// GRAPH-27, GRAPH-28
TEST(GraphSplit, PartsThatOnlyWriteToAParameterJoinOthers) {
  const auto module = std::make_shared<NormedImpl>();
  const auto graph = captured(module, torch::randn({2, 8}));
  for (const std::size_t cap : {std::size_t{1}, kLinear, 2 * kLinear}) {
    const auto buckets = plan_split(graph, {.bucket_bytes_cap = cap, .first_bucket_cap = 1});
    expect_whole(graph, buckets);
    EXPECT_EQ(graph::extract_parts(graph, buckets).size(), buckets.size());
  }
}

}  // namespace lockstep::graph_split_test
