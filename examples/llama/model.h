// Llama as published: RMSNorm before each part, rotary positions, queries that share keys and values, SwiGLU. Modules
// are named as in Hugging Face's files, so weights need no map of names. It knows nothing of ranks.
#pragma once

#include <lockstep/nn/norms.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include "examples/common/language_model.h"
#include "examples/llama/config.h"

namespace lockstep::examples {

/// By how much each pair of a head's features is turned at each position: [length, head_dim].
struct Rotation {
  at::Tensor cos;
  at::Tensor sin;
};

/// Of positions 0 to `length`. Computed when needed: a tensor that is kept would be one more to shard, move and save.
Rotation rotation_of(const LlamaConfig& config, int64_t length, at::Device device);

struct LlamaAttentionImpl : torch::nn::Module {
  explicit LlamaAttentionImpl(const LlamaConfig& config);
  at::Tensor forward(const at::Tensor& x, const Rotation& rotation);

  int64_t head_dim;
  torch::nn::Linear q_proj;
  torch::nn::Linear k_proj;
  torch::nn::Linear v_proj;
  torch::nn::Linear o_proj;
};
TORCH_MODULE(LlamaAttention);

struct LlamaMLPImpl : torch::nn::Module {
  explicit LlamaMLPImpl(const LlamaConfig& config);
  at::Tensor forward(const at::Tensor& x);

  torch::nn::Linear gate_proj;
  torch::nn::Linear up_proj;
  torch::nn::Linear down_proj;
};
TORCH_MODULE(LlamaMLP);

struct LlamaDecoderLayerImpl : torch::nn::Module {
  explicit LlamaDecoderLayerImpl(const LlamaConfig& config);
  at::Tensor forward(const at::Tensor& x, const Rotation& rotation);

  LlamaAttention self_attn;
  LlamaMLP mlp;
  nn::RMSNorm input_layernorm;
  nn::RMSNorm post_attention_layernorm;
};
TORCH_MODULE(LlamaDecoderLayer);

struct LlamaModelImpl : torch::nn::Module {
  explicit LlamaModelImpl(const LlamaConfig& sizes);
  /// Token numbers to features, [batch, length, hidden_size].
  at::Tensor forward(const at::Tensor& tokens);

  const LlamaConfig config;
  /// Whether backward computes a layer's activations again instead of keeping them.
  bool checkpoints_activations = false;
  torch::nn::Embedding embed_tokens;
  torch::nn::ModuleList layers;
  nn::RMSNorm norm;
};
TORCH_MODULE(LlamaModel);

struct LlamaForCausalLMImpl : LanguageModel {
  explicit LlamaForCausalLMImpl(const LlamaConfig& config);
  at::Tensor forward(const at::Tensor& tokens) override;

  LlamaModel model;
  torch::nn::Linear lm_head;  // with tie_word_embeddings its weight is that of embed_tokens
};
TORCH_MODULE(LlamaForCausalLM);

}  // namespace lockstep::examples
