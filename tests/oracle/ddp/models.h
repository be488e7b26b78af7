// Twins of the models in models.py: the same names, and the same operators in the same order.
#pragma once

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <cmath>
#include <memory>
#include <string>
#include <vector>

namespace lockstep::ddp_oracle {

/// `uses` are the branches a step takes; models without any ignore it.
struct Model : torch::nn::Module {
  using Module::Module;
  virtual at::Tensor forward(const at::Tensor& input, const std::vector<int64_t>& uses) = 0;
};

struct Mlp : Model {
  Mlp() : Model("Mlp") {}
  at::Tensor forward(const at::Tensor& input, const std::vector<int64_t>& /*uses*/) override {
    return layer2(at::tanh(layer1(at::tanh(layer0(input)))));
  }
  torch::nn::Linear layer0 = register_module("layer0", torch::nn::Linear(6, 9));
  torch::nn::Linear layer1 = register_module("layer1", torch::nn::Linear(9, 7));
  torch::nn::Linear layer2 = register_module("layer2", torch::nn::Linear(7, 3));
};

struct ConvNet : Model {
  ConvNet() : Model("ConvNet") {}
  at::Tensor forward(const at::Tensor& input, const std::vector<int64_t>& /*uses*/) override {
    auto hidden = at::relu(norm0(conv0(input)));
    hidden = at::relu(norm1(conv1(hidden)));
    return head(hidden.mean({2, 3}));
  }
  torch::nn::Conv2d conv0 = register_module("conv0", torch::nn::Conv2d(torch::nn::Conv2dOptions(2, 4, 3).padding(1)));
  torch::nn::BatchNorm2d norm0 = register_module("norm0", torch::nn::BatchNorm2d(4));
  torch::nn::Conv2d conv1 = register_module("conv1", torch::nn::Conv2d(torch::nn::Conv2dOptions(4, 5, 3)));
  torch::nn::BatchNorm2d norm1 = register_module("norm1", torch::nn::BatchNorm2d(5));
  torch::nn::Linear head = register_module("head", torch::nn::Linear(5, 3));
};

struct Block : torch::nn::Module {
  explicit Block(int64_t width)
      : norm0(register_module("norm0", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        query(register_module("query", without_bias(width))),
        key(register_module("key", without_bias(width))),
        value(register_module("value", without_bias(width))),
        norm1(register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        up(register_module("up", torch::nn::Linear(width, 2 * width))),
        down(register_module("down", torch::nn::Linear(2 * width, width))) {}

  at::Tensor forward(const at::Tensor& input) {
    const auto normed = norm0(input);
    // One by one: gradients add up in the order of these calls, and C++ may evaluate arguments in any.
    const auto queries = query(normed);
    const auto scores = at::matmul(queries, key(normed).transpose(1, 2));
    const auto shares = at::softmax(scores / std::sqrt(static_cast<double>(input.size(2))), -1);
    const auto hidden = input + at::matmul(shares, value(normed));
    return hidden + apply(down, at::gelu(apply(up, norm1(hidden))));
  }

  /// torch::nn::Linear adds the bias afterwards if there are three dims, and rounds twice.
  static at::Tensor apply(const torch::nn::Linear& layer, const at::Tensor& input) {
    return at::linear(input, layer->weight, layer->bias);
  }

  static torch::nn::Linear without_bias(int64_t width) {
    return torch::nn::Linear(torch::nn::LinearOptions(width, width).bias(false));
  }

  torch::nn::LayerNorm norm0;
  torch::nn::Linear query;
  torch::nn::Linear key;
  torch::nn::Linear value;
  torch::nn::LayerNorm norm1;
  torch::nn::Linear up;
  torch::nn::Linear down;
};

/// A linear layer with somebody else's weight.
struct TiedHead : torch::nn::Module {
  TiedHead(const at::Tensor& shared, int64_t outputs)
      : weight(register_parameter("weight", shared)), bias(register_parameter("bias", at::zeros({outputs}))) {}
  at::Tensor forward(const at::Tensor& input) { return at::linear(input, weight, bias); }
  at::Tensor weight;
  at::Tensor bias;
};

struct Transformer : Model {
  Transformer() : Model("Transformer") {}
  at::Tensor forward(const at::Tensor& input, const std::vector<int64_t>& /*uses*/) override {
    const auto hidden = embed(input) + places;
    return head->forward(other->forward(again->forward(block->forward(hidden))));
  }
  at::Tensor places = register_parameter("places", at::zeros({3, 4}));
  torch::nn::Embedding embed = register_module("embed", torch::nn::Embedding(7, 4));
  std::shared_ptr<Block> block = register_module("block", std::make_shared<Block>(4));
  std::shared_ptr<Block> again = register_module("again", block);
  std::shared_ptr<Block> other = register_module("other", std::make_shared<Block>(4));
  std::shared_ptr<TiedHead> head = register_module("head", std::make_shared<TiedHead>(embed->weight, 7));
};

struct Bags : Model {
  Bags() : Model("Bags") {}
  at::Tensor forward(const at::Tensor& input, const std::vector<int64_t>& /*uses*/) override {
    const auto bags = words(input);  // before the other: see Block
    return head(at::tanh(bags + 2 * firsts(at::remainder(input.select(1, 0), 5))));
  }
  torch::nn::EmbeddingBag words = register_module(
      "words", torch::nn::EmbeddingBag(torch::nn::EmbeddingBagOptions(13, 4).mode(torch::kMean).sparse(true)));
  torch::nn::Embedding firsts =
      register_module("firsts", torch::nn::Embedding(torch::nn::EmbeddingOptions(5, 4).sparse(true)));
  torch::nn::Linear head = register_module("head", torch::nn::Linear(4, 3));
};

struct Branchy : Model {
  Branchy() : Model("Branchy") {}
  at::Tensor forward(const at::Tensor& input, const std::vector<int64_t>& uses) override {
    const auto hidden = at::tanh(trunk(input));
    auto output = hidden.narrow(1, 0, 3);
    torch::nn::Linear branches[] = {branch0, branch1, branch2};
    for (const auto branch : uses) output = output + branches[branch]->forward(hidden);
    return output;
  }
  torch::nn::Linear trunk = register_module("trunk", torch::nn::Linear(4, 5));
  torch::nn::Linear branch0 = register_module("branch0", torch::nn::Linear(5, 3));
  torch::nn::Linear branch1 = register_module("branch1", torch::nn::Linear(5, 3));
  torch::nn::Linear branch2 = register_module("branch2", torch::nn::Linear(5, 3));
};

struct Reused : Model {
  Reused() : Model("Reused") {}
  at::Tensor forward(const at::Tensor& input, const std::vector<int64_t>& /*uses*/) override {
    return last(at::tanh(first(at::tanh(first(input)))));
  }
  torch::nn::Linear first = register_module("first", torch::nn::Linear(4, 4));
  torch::nn::Linear never = register_module("never", torch::nn::Linear(4, 4));
  torch::nn::Linear last = register_module("last", torch::nn::Linear(4, 3));
};

struct TwoDtypes : Model {
  TwoDtypes() : Model("TwoDtypes") {
    double0->to(at::kDouble);
    double1->to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& input, const std::vector<int64_t>& /*uses*/) override {
    const auto hidden = at::tanh(double0(at::tanh(single0(input)).to(at::kDouble)));
    return double1(at::tanh(single1(hidden.to(at::kFloat))).to(at::kDouble)).to(at::kFloat);
  }
  torch::nn::Linear single0 = register_module("single0", torch::nn::Linear(5, 6));
  torch::nn::Linear double0 = register_module("double0", torch::nn::Linear(6, 6));
  torch::nn::Linear single1 = register_module("single1", torch::nn::Linear(6, 4));
  torch::nn::Linear double1 = register_module("double1", torch::nn::Linear(4, 3));
};

struct Phases : Model {
  Phases() : Model("Phases") {}
  at::Tensor forward(const at::Tensor& input, const std::vector<int64_t>& /*uses*/) override {
    const auto turned = layer(input) * turns;
    return at::real(turned) + at::imag(turned);
  }
  at::Tensor turns = register_parameter("turns", at::zeros({6}, at::kComplexFloat));
  torch::nn::Linear layer = register_module("layer", torch::nn::Linear(4, 6));
};

struct FourLinears : Model {
  FourLinears() : Model("FourLinears") {
    for (int i = 0; i < 4; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i), torch::nn::Linear(600, 600)));
    }
  }
  at::Tensor forward(const at::Tensor& input, const std::vector<int64_t>& /*uses*/) override {
    auto hidden = input;
    for (auto& layer : layers) hidden = layer(hidden);
    return hidden;
  }
  std::vector<torch::nn::Linear> layers;
};

/// By the name of its class in Python.
inline std::shared_ptr<Model> make_model(const std::string& name) {
  if (name == "Mlp") return std::make_shared<Mlp>();
  if (name == "ConvNet") return std::make_shared<ConvNet>();
  if (name == "Transformer") return std::make_shared<Transformer>();
  if (name == "Bags") return std::make_shared<Bags>();
  if (name == "Branchy") return std::make_shared<Branchy>();
  if (name == "Reused") return std::make_shared<Reused>();
  if (name == "TwoDtypes") return std::make_shared<TwoDtypes>();
  if (name == "Phases") return std::make_shared<Phases>();
  if (name == "FourLinears") return std::make_shared<FourLinears>();
  TORCH_CHECK(false, "there is no twin of the model '", name, "'");
}

}  // namespace lockstep::ddp_oracle
