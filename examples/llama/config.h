// The sizes of a Llama: Hugging Face's config.json, under its names.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace lockstep::examples {

/// Llama 3's way to longer contexts: slow rotations are slowed down by `factor`, quick ones stay, and those between are
/// in between.
struct RopeScaling {
  double factor = 8;
  double low_freq_factor = 1;
  double high_freq_factor = 4;
  int64_t original_max_position_embeddings = 8192;
};

/// By default a model that learns bytes on a laptop.
struct LlamaConfig {
  int64_t vocab_size = 256;
  int64_t hidden_size = 128;
  int64_t intermediate_size = 352;
  int64_t num_hidden_layers = 2;
  int64_t num_attention_heads = 4;
  int64_t num_key_value_heads = 2;  // each serves as many query heads
  int64_t head_dim = 32;            // even
  int64_t max_position_embeddings = 2048;
  double rms_norm_eps = 1e-5;
  double rope_theta = 10000;
  std::optional<RopeScaling> rope_scaling = std::nullopt;
  double initializer_range = 0.02;
  bool tie_word_embeddings = false;
  bool attention_bias = false;
  bool mlp_bias = false;
};

/// Reads config.json as Hugging Face's releases write it, old or new. Refuses what the model does not have, naming the
/// key. Local.
LlamaConfig read_config(const std::string& file);

/// The config.json of a model with weights in float32. With `source`, another config.json, all other keys of that one
/// are kept. Local.
std::string config_json(const LlamaConfig& config, const std::string& source = "");

}  // namespace lockstep::examples
