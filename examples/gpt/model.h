// A small GPT: a decoder-only transformer over tokens, pre-norm, with learned positions. Shared by the demo and the
// benchmark of DistributedDataParallel; it knows nothing of ranks.
#pragma once

#include <torch/nn/init.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include <cmath>

#include "examples/common/language_model.h"

namespace lockstep::examples {

struct GptConfig {
  int64_t vocabulary = 64;
  int64_t context = 128;  // tokens that are looked back at
  int64_t layers = 2;
  int64_t heads = 4;
  int64_t width = 128;  // a multiple of heads
};

/// Attention over the tokens before, then two linear layers, each added to what came in.
struct GptBlockImpl : torch::nn::Module {
  explicit GptBlockImpl(const GptConfig& config)
      : heads(config.heads),
        attention_norm(register_module("attention_norm", norm(config))),
        attention_in(register_module("attention_in", torch::nn::Linear(config.width, 3 * config.width))),
        attention_out(register_module("attention_out", torch::nn::Linear(config.width, config.width))),
        mlp_norm(register_module("mlp_norm", norm(config))),
        mlp_in(register_module("mlp_in", torch::nn::Linear(config.width, 4 * config.width))),
        mlp_out(register_module("mlp_out", torch::nn::Linear(4 * config.width, config.width))) {}

  at::Tensor forward(at::Tensor x) {
    x = x + attention_out(attend(attention_in(attention_norm(x))));
    return x + mlp_out(at::gelu(mlp_in(mlp_norm(x))));
  }

  int64_t heads;
  torch::nn::LayerNorm attention_norm;
  torch::nn::Linear attention_in;
  torch::nn::Linear attention_out;
  torch::nn::LayerNorm mlp_norm;
  torch::nn::Linear mlp_in;
  torch::nn::Linear mlp_out;

 private:
  static torch::nn::LayerNorm norm(const GptConfig& config) {
    return torch::nn::LayerNorm(torch::nn::LayerNormOptions({config.width}));
  }

  at::Tensor attend(const at::Tensor& queries_keys_values) const {
    const auto batch = queries_keys_values.size(0);
    const auto length = queries_keys_values.size(1);
    // [batch, length, 3 * width] -> three of [batch, heads, length, width / heads]
    const auto parts = queries_keys_values.view({batch, length, 3, heads, -1}).permute({2, 0, 3, 1, 4}).unbind(0);
    const auto mixed = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], /*attn_mask=*/{},
                                                        /*dropout_p=*/0, /*is_causal=*/true);
    return mixed.transpose(1, 2).reshape({batch, length, -1});
  }
};
TORCH_MODULE(GptBlock);

struct GptImpl : LanguageModel {
  explicit GptImpl(const GptConfig& sizes)
      : config(sizes),
        tokens(register_module("tokens", torch::nn::Embedding(config.vocabulary, config.width))),
        positions(register_module("positions", torch::nn::Embedding(config.context, config.width))),
        blocks(register_module("blocks", torch::nn::ModuleList())),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({config.width})))),
        head(register_module("head", torch::nn::Linear(config.width, config.vocabulary))) {
    for (int64_t i = 0; i < config.layers; ++i) blocks->push_back(GptBlock(config));
    initialize();
  }

  at::Tensor forward(const at::Tensor& input) override {
    TORCH_CHECK(input.dim() == 2 && input.size(1) <= config.context,
                "GPT takes [batch, length] with a length of up to ", config.context, ", not ", input.sizes());
    const auto places = at::arange(input.size(1), input.options());
    auto x = tokens(input) + positions(places);
    for (const auto& block : *blocks) x = block->as<GptBlock>()->forward(x);
    return head(norm(x));
  }

  const GptConfig config;
  torch::nn::Embedding tokens;
  torch::nn::Embedding positions;
  torch::nn::ModuleList blocks;
  torch::nn::LayerNorm norm;
  torch::nn::Linear head;

 private:
  /// As GPT-2 does: small weights, and smaller ones where layers add to the same sum.
  void initialize() {
    const at::NoGradGuard no_grad;
    const double sum_std = 0.02 / std::sqrt(2.0 * static_cast<double>(config.layers));
    for (auto& parameter : named_parameters()) {
      const auto& name = parameter.key();
      if (name.find("norm") != std::string::npos) continue;
      const bool is_bias = name.ends_with("bias");
      const bool adds_up = name.ends_with("_out.weight");
      is_bias ? parameter.value().zero_() : parameter.value().normal_(0, adds_up ? sum_std : 0.02);
    }
  }
};
TORCH_MODULE(Gpt);

}  // namespace lockstep::examples
