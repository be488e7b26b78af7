// Cuts beside those of PyTorch's DDPOptimizer, on the same models and caps.
#include <torch/torch.h>

#include <algorithm>

#include "lockstep/graph/capture.h"
#include "lockstep/graph/split.h"
#include "lockstep/testing/gtest.h"
#include "tests/support/oracle_reference.h"

namespace lockstep::graph_oracle_test {
namespace {

struct Mlp : torch::nn::Module {
  Mlp() {
    register_module("layers", layers);
    for (int i = 0; i < 6; ++i) layers->push_back(torch::nn::Linear(16, 16));
  }
  at::Tensor forward(const at::Tensor& input) {
    auto x = input * 2;
    for (const auto& layer : *layers) x = at::tanh(layer->as<torch::nn::Linear>()->forward(x));
    return x;
  }
  torch::nn::ModuleList layers;
};

struct Convs : torch::nn::Module {
  Convs() {
    register_module("convs", convs);
    register_module("norms", norms);
    for (int i = 0; i < 4; ++i) {
      convs->push_back(torch::nn::Conv2d(torch::nn::Conv2dOptions(4, 4, 3).padding(1)));
      norms->push_back(torch::nn::BatchNorm2d(4));
    }
    head = register_module("head", torch::nn::Linear(4, 3));
  }
  at::Tensor forward(at::Tensor x) {
    for (std::size_t i = 0; i < 4; ++i) {
      x = at::relu(norms[i]->as<torch::nn::BatchNorm2d>()->forward(convs[i]->as<torch::nn::Conv2d>()->forward(x)));
    }
    return head->forward(x.mean({2, 3}));
  }
  torch::nn::ModuleList convs, norms;
  torch::nn::Linear head{nullptr};
};

struct Normed : torch::nn::Module {
  Normed() {
    embedding = register_module("embedding", torch::nn::Embedding(32, 16));
    register_module("ups", ups);
    register_module("downs", downs);
    register_module("norms", norms);
    for (int i = 0; i < 3; ++i) {
      ups->push_back(torch::nn::Linear(16, 64));
      downs->push_back(torch::nn::Linear(64, 16));
      norms->push_back(torch::nn::LayerNorm(torch::nn::LayerNormOptions({16})));
    }
  }
  at::Tensor forward(const at::Tensor& ids) {
    auto x = embedding->forward(ids);
    for (std::size_t i = 0; i < 3; ++i) {
      const auto hidden = ups[i]->as<torch::nn::Linear>()->forward(norms[i]->as<torch::nn::LayerNorm>()->forward(x));
      x = x + downs[i]->as<torch::nn::Linear>()->forward(at::relu(hidden));
    }
    return x;
  }
  torch::nn::Embedding embedding{nullptr};
  torch::nn::ModuleList ups, downs, norms;
};

template <class Module>
void expect_python_buckets(const c10::IValue& reference, const at::Tensor& x) {
  Module module;
  const auto graph = graph::capture({x}, graph::outer_tensors(module), [&](const std::vector<at::Tensor>& fakes) {
    return std::vector<at::Tensor>{module.forward(fakes[0])};
  });
  for (const auto& item : reference.toGenericDict()) {
    const auto& caps = item.key().toStringRef();
    const auto slash = caps.find('/');
    const auto buckets = plan_split(graph, {.bucket_bytes_cap = std::stoul(caps.substr(0, slash)),
                                            .first_bucket_cap = std::stoul(caps.substr(slash + 1))});
    const auto expected = item.value().toListRef();
    ASSERT_EQ(buckets.size(), expected.size()) << caps << "\n" << graph::bucket_table(buckets) << graph.to_string();
    for (std::size_t i = 0; i < buckets.size(); ++i) {
      EXPECT_EQ(static_cast<std::int64_t>(buckets[i].bytes), oracle::at_key(expected[i], "bytes").toInt()) << caps;
      auto names = buckets[i].names;
      std::sort(names.begin(), names.end());
      std::vector<std::string> wanted;
      for (const auto& name : oracle::at_key(expected[i], "names").toListRef()) wanted.push_back(name.toStringRef());
      EXPECT_EQ(names, wanted) << caps << " bucket " << i;
    }
  }
}

}  // namespace

// GRAPH-12, GRAPH-13, GRAPH-14, GRAPH-19
TEST(GraphOracle, CutsWherePythonsOptimizerDoes) {
  const auto reference = oracle::run_reference("graph/buckets_reference.py");
  if (reference.isNone()) GTEST_SKIP() << "there is no Python with torch";
  expect_python_buckets<Mlp>(oracle::at_key(reference, "mlp"), torch::randn({4, 16}));
  expect_python_buckets<Convs>(oracle::at_key(reference, "convs"), torch::randn({2, 4, 5, 5}));
  expect_python_buckets<Normed>(oracle::at_key(reference, "normed"), torch::randint(32, {2, 5}));
}

}  // namespace lockstep::graph_oracle_test
