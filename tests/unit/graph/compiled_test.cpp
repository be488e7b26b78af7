// Captured forwards beside the modules they were captured from: outputs, gradients, statistics, random numbers.
#include "lockstep/graph/compiled.h"

#include <torch/torch.h>

#include "lockstep/testing/checks.h"
#include "tests/support/error_text.h"

namespace lockstep::graph_compiled_test {
namespace {

using testing::expect_error;

struct MlpImpl : torch::nn::Module {
  explicit MlpImpl(std::int64_t width = 8, int depth = 4) {
    for (int i = 0; i < depth; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i), torch::nn::Linear(width, width)));
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    auto y = x * 2;
    for (auto& layer : layers) y = at::relu(layer->forward(y));
    return y;
  }
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Mlp);

struct ConvNetImpl : torch::nn::Module {
  ConvNetImpl()
      : conv(register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(2, 4, 3).padding(1)))),
        norm(register_module("norm", torch::nn::BatchNorm2d(4))),
        drop(register_module("drop", torch::nn::Dropout(0.4))),
        head(register_module("head", torch::nn::Linear(4, 3))) {}
  at::Tensor forward(const at::Tensor& x) {
    auto y = norm->forward(conv->forward(x)).relu_();
    y = at::adaptive_avg_pool2d(y, {1, 1}).flatten(1);
    return at::log_softmax(head->forward(drop->forward(y)), 1);
  }
  torch::nn::Conv2d conv;
  torch::nn::BatchNorm2d norm;
  torch::nn::Dropout drop;
  torch::nn::Linear head;
};
TORCH_MODULE(ConvNet);

struct AttentionNetImpl : torch::nn::Module {
  AttentionNetImpl()
      : layer(register_module("layer", torch::nn::TransformerEncoderLayer(
                                           torch::nn::TransformerEncoderLayerOptions(8, 2).dim_feedforward(16)))) {}
  at::Tensor forward(const at::Tensor& x) { return layer->forward(x); }
  torch::nn::TransformerEncoderLayer layer;
};
TORCH_MODULE(AttentionNet);

/// The same steps through both: same bits, whatever is random.
template <class Holder>
void expect_same(const CompileOptions& options, const at::Tensor& x, bool is_exact = true) {
  torch::manual_seed(1);
  Holder plain;
  torch::manual_seed(1);
  Compiled<Holder> compiled;
  compiled->set_compile_options(options);
  const auto same = [&](const at::Tensor& a, const at::Tensor& b) {
    return is_exact ? at::equal(a, b) : at::allclose(a, b, 1e-4, 1e-5);
  };
  for (const bool is_training : {true, false, true}) {
    plain->train(is_training);
    compiled->train(is_training);
    for (int step = 0; step < 2; ++step) {
      auto a = x.detach().clone().requires_grad_();
      auto b = x.detach().clone().requires_grad_();
      torch::manual_seed(7 + step);
      const auto expected = plain->forward(a);
      torch::manual_seed(7 + step);
      const auto got = compiled->forward(b);
      EXPECT_TRUE(same(got, expected)) << options.backend << is_training << step;
      plain->zero_grad();
      compiled->zero_grad();
      expected.pow(2).sum().backward();
      got.pow(2).sum().backward();
      EXPECT_TRUE(same(a.grad(), b.grad()));
      const auto wanted = plain->named_parameters();
      for (const auto& item : compiled->named_parameters()) {
        EXPECT_TRUE(same(item.value().grad(), wanted[item.key()].grad())) << item.key();
      }
      for (const auto& item : compiled->named_buffers()) {
        EXPECT_TRUE(same(item.value().to(at::kDouble), plain->named_buffers()[item.key()].to(at::kDouble)))
            << item.key();
      }
      const torch::NoGradGuard no_grad;
      EXPECT_TRUE(is_training || same(plain->forward(x), compiled->forward(x)));
    }
  }
}

}  // namespace

// GRAPH-7, GRAPH-20, GRAPH-29, GRAPH-38
TEST(GraphCompiled, GivesTheBitsOfTheModule) {
  for (const auto* const backend : {"eager", "autograd"}) {
    expect_same<Mlp>({.backend = backend}, torch::randn({3, 8}));
    expect_same<ConvNet>({.backend = backend}, torch::randn({4, 2, 5, 5}));
    expect_same<AttentionNet>({.backend = backend}, torch::randn({5, 2, 8}));
  }
}

// GRAPH-4, GRAPH-37
TEST(GraphCompiled, RunsThroughTorchScript) {
  expect_same<Mlp>({.backend = "executor"}, torch::randn({3, 8}), /*is_exact=*/false);
  expect_same<ConvNet>({.backend = "executor"}, torch::randn({4, 2, 5, 5}), /*is_exact=*/false);
}

}  // namespace lockstep::graph_compiled_test
