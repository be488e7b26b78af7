#include "examples/llama/model.h"

#include <lockstep/checkpointing/checkpoint.h>
#include <lockstep/nn/tied_parameters.h>
#include <torch/torch.h>

#include <numbers>

namespace lockstep::examples {
namespace {

// Each is given its values where it is built, so that a layer of a deferred model draws no others' numbers.
torch::nn::Linear linear(int64_t in, int64_t out, bool bias, const LlamaConfig& config) {
  torch::nn::Linear layer(torch::nn::LinearOptions(in, out).bias(bias));
  torch::nn::init::normal_(layer->weight, 0, config.initializer_range);
  if (bias) torch::nn::init::zeros_(layer->bias);
  return layer;
}

torch::nn::Embedding embedding(const LlamaConfig& config) {
  torch::nn::Embedding layer(config.vocab_size, config.hidden_size);
  torch::nn::init::normal_(layer->weight, 0, config.initializer_range);
  return layer;
}

nn::RMSNorm norm_of(const LlamaConfig& config) {
  return nn::RMSNorm(nn::RMSNormOptions{.normalized_shape = {config.hidden_size}, .eps = config.rms_norm_eps});
}

/// In turns per position.
at::Tensor frequencies_of(const LlamaConfig& config) {
  const auto exponents = at::arange(0, config.head_dim, 2, at::kFloat) / config.head_dim;
  const auto frequencies = 1 / at::pow(config.rope_theta, exponents);
  if (!config.rope_scaling) return frequencies;
  const auto& scaling = *config.rope_scaling;
  // How often each turns within the context that the model was first trained on.
  const auto turns = scaling.original_max_position_embeddings * frequencies / (2 * std::numbers::pi);
  const auto quick =
      ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1);
  return (1 - quick) * frequencies / scaling.factor + quick * frequencies;
}

/// Pairs are a feature of the first half and the one at its place in the second. `x` is [batch, heads, length,
/// head_dim].
at::Tensor turned(const at::Tensor& x, const Rotation& rotation) {
  const auto halves = x.chunk(2, -1);
  return x * rotation.cos.to(x.dtype()) + at::cat({-halves[1], halves[0]}, -1) * rotation.sin.to(x.dtype());
}

}  // namespace

Rotation rotation_of(const LlamaConfig& config, int64_t length, at::Device device) {
  const auto angles = at::outer(at::arange(length, at::kFloat), frequencies_of(config)).repeat({1, 2}).to(device);
  return {angles.cos(), angles.sin()};
}

LlamaAttentionImpl::LlamaAttentionImpl(const LlamaConfig& config)
    : head_dim(config.head_dim),
      q_proj(register_module(
          "q_proj", linear(config.hidden_size, config.num_attention_heads * head_dim, config.attention_bias, config))),
      k_proj(register_module(
          "k_proj", linear(config.hidden_size, config.num_key_value_heads * head_dim, config.attention_bias, config))),
      v_proj(register_module(
          "v_proj", linear(config.hidden_size, config.num_key_value_heads * head_dim, config.attention_bias, config))),
      o_proj(register_module(
          "o_proj", linear(config.num_attention_heads * head_dim, config.hidden_size, config.attention_bias, config))) {
}

at::Tensor LlamaAttentionImpl::forward(const at::Tensor& x, const Rotation& rotation) {
  // [batch, length, heads * head_dim] -> [batch, heads, length, head_dim], with the heads that are here.
  const auto heads = [&](const at::Tensor& features) {
    return features.view({x.size(0), x.size(1), -1, head_dim}).transpose(1, 2);
  };
  const auto mixed = at::scaled_dot_product_attention(
      turned(heads(q_proj(x)), rotation), turned(heads(k_proj(x)), rotation), heads(v_proj(x)), /*attn_mask=*/{},
      /*dropout_p=*/0, /*is_causal=*/true, /*scale=*/std::nullopt, /*enable_gqa=*/true);
  return o_proj(mixed.transpose(1, 2).reshape({x.size(0), x.size(1), -1}));
}

LlamaMLPImpl::LlamaMLPImpl(const LlamaConfig& config)
    : gate_proj(
          register_module("gate_proj", linear(config.hidden_size, config.intermediate_size, config.mlp_bias, config))),
      up_proj(
          register_module("up_proj", linear(config.hidden_size, config.intermediate_size, config.mlp_bias, config))),
      down_proj(register_module("down_proj",
                                linear(config.intermediate_size, config.hidden_size, config.mlp_bias, config))) {}

at::Tensor LlamaMLPImpl::forward(const at::Tensor& x) {
  return down_proj(at::silu(gate_proj(x)) * up_proj(x));
}

LlamaDecoderLayerImpl::LlamaDecoderLayerImpl(const LlamaConfig& config)
    : self_attn(register_module("self_attn", LlamaAttention(config))),
      mlp(register_module("mlp", LlamaMLP(config))),
      input_layernorm(register_module("input_layernorm", norm_of(config))),
      post_attention_layernorm(register_module("post_attention_layernorm", norm_of(config))) {}

at::Tensor LlamaDecoderLayerImpl::forward(const at::Tensor& x, const Rotation& rotation) {
  const auto attended = x + self_attn(input_layernorm(x), rotation);
  return attended + mlp(post_attention_layernorm(attended));
}

LlamaModelImpl::LlamaModelImpl(const LlamaConfig& sizes)
    : config(sizes),
      embed_tokens(register_module("embed_tokens", embedding(config))),
      layers(register_module("layers", torch::nn::ModuleList())),
      norm(register_module("norm", norm_of(config))) {
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) layers->push_back(LlamaDecoderLayer(config));
}

at::Tensor LlamaModelImpl::forward(const at::Tensor& tokens) {
  TORCH_CHECK(tokens.dim() == 2 && tokens.size(1) <= config.max_position_embeddings,
              "Llama takes [batch, length] with a length of up to ", config.max_position_embeddings, ", not ",
              tokens.sizes());
  auto x = embed_tokens(tokens);
  const auto rotation = rotation_of(config, tokens.size(1), tokens.device());
  for (const auto& layer : *layers) {
    const auto run = [&layer = *layer->as<LlamaDecoderLayer>(), rotation](const at::Tensor& features) {
      return layer.forward(features, rotation);
    };
    x = checkpoints_activations ? checkpoint(run, x) : run(x);
  }
  return norm(x);
}

LlamaForCausalLMImpl::LlamaForCausalLMImpl(const LlamaConfig& config)
    : model(register_module("model", LlamaModel(config))),
      lm_head(register_module("lm_head", linear(config.hidden_size, config.vocab_size, /*bias=*/false, config))) {
  if (config.tie_word_embeddings) tie_parameter(*lm_head, "weight", lm_head->weight, model->embed_tokens->weight);
}

at::Tensor LlamaForCausalLMImpl::forward(const at::Tensor& tokens) {
  return lm_head(model(tokens));
}

}  // namespace lockstep::examples
