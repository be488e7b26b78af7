#include "examples/llama/config.h"

#include <utility>

#include "examples/llama/read_json.h"

namespace lockstep::examples {
namespace {

bool has(const Json& json, const char* key) {
  const auto found = json.find(key);
  return found != json.end() && !found->is_null();
}

/// Keys of one file, read by name.
class Reader {
 public:
  Reader(const Json& json, std::string place) : json_(json), place_(std::move(place)) {}

  template <class T>
  void read(const char* key, T& value) const {
    TORCH_CHECK(has(json_, key), place_, ": '", key, "' is missing");
    read_if_there(key, value);
  }

  template <class T>
  void read_if_there(const char* key, T& value) const {
    if (!has(json_, key)) return;
    try {
      value = json_.at(key).get<T>();
    } catch (const nlohmann::json::exception&) {
      TORCH_CHECK(false, place_, ": '", key, "' is ", json_.at(key).dump());
    }
  }

  /// For keys of which the model knows one value.
  template <class T>
  void expect(const char* key, const T& known) const {
    T value = known;
    read_if_there(key, value);
    TORCH_CHECK(value == known, place_, ": '", key, "' is ", json_.at(key).dump(), "; only ", Json(known).dump(),
                " is supported");
  }

 private:
  const Json& json_;
  const std::string place_;
};

/// "rope_parameters" of newer files has rope_theta in it; older ones have "rope_scaling", or null, beside it.
void read_rope(const Json& json, const std::string& file, LlamaConfig& config) {
  Reader(json, file).read_if_there("rope_theta", config.rope_theta);
  const char* key = has(json, "rope_parameters") ? "rope_parameters" : "rope_scaling";
  if (!has(json, key)) return;
  const auto& rope = json.at(key);
  const Reader reader(rope, file + ", " + key);
  reader.read_if_there("rope_theta", config.rope_theta);
  reader.expect("partial_rotary_factor", 1.0);
  std::string type = "default";
  reader.read_if_there(has(rope, "rope_type") ? "rope_type" : "type", type);
  if (type == "default") return;
  TORCH_CHECK(type == "llama3", file, ": the rope_type \"", type, "\" of '", key,
              "' is not supported; \"default\" and \"llama3\" are");
  auto& scaling = config.rope_scaling.emplace();
  reader.read("factor", scaling.factor);
  reader.read("low_freq_factor", scaling.low_freq_factor);
  reader.read("high_freq_factor", scaling.high_freq_factor);
  reader.read("original_max_position_embeddings", scaling.original_max_position_embeddings);
}

/// As older releases have it, which newer ones read too.
Json rope_scaling_json(const LlamaConfig& config) {
  if (!config.rope_scaling) return nullptr;
  const auto& scaling = *config.rope_scaling;
  return {{"rope_type", "llama3"},
          {"factor", scaling.factor},
          {"low_freq_factor", scaling.low_freq_factor},
          {"high_freq_factor", scaling.high_freq_factor},
          {"original_max_position_embeddings", scaling.original_max_position_embeddings}};
}

Json as_json(const LlamaConfig& config) {
  return {{"architectures", {"LlamaForCausalLM"}},
          {"model_type", "llama"},
          {"hidden_act", "silu"},
          {"vocab_size", config.vocab_size},
          {"hidden_size", config.hidden_size},
          {"intermediate_size", config.intermediate_size},
          {"num_hidden_layers", config.num_hidden_layers},
          {"num_attention_heads", config.num_attention_heads},
          {"num_key_value_heads", config.num_key_value_heads},
          {"head_dim", config.head_dim},
          {"max_position_embeddings", config.max_position_embeddings},
          {"rms_norm_eps", config.rms_norm_eps},
          {"rope_theta", config.rope_theta},
          {"rope_scaling", rope_scaling_json(config)},
          {"initializer_range", config.initializer_range},
          {"tie_word_embeddings", config.tie_word_embeddings},
          {"attention_bias", config.attention_bias},
          {"mlp_bias", config.mlp_bias}};
}

}  // namespace

LlamaConfig read_config(const std::string& file) {
  const auto json = read_json(file);
  const Reader reader(json, file);
  reader.expect<std::string>("model_type", "llama");
  reader.expect<std::string>("hidden_act", "silu");
  reader.expect("attention_dropout", 0.0);
  TORCH_CHECK(!has(json, "quantization_config"), file, ": 'quantization_config' is not supported");

  LlamaConfig config;
  reader.read("vocab_size", config.vocab_size);
  reader.read("hidden_size", config.hidden_size);
  reader.read("intermediate_size", config.intermediate_size);
  reader.read("num_hidden_layers", config.num_hidden_layers);
  reader.read("num_attention_heads", config.num_attention_heads);
  TORCH_CHECK(config.num_attention_heads > 0, file, ": 'num_attention_heads' is ", config.num_attention_heads);
  config.num_key_value_heads = config.num_attention_heads;
  reader.read_if_there("num_key_value_heads", config.num_key_value_heads);
  TORCH_CHECK(config.num_key_value_heads > 0 && config.num_attention_heads % config.num_key_value_heads == 0, file,
              ": 'num_key_value_heads' is ", config.num_key_value_heads, ", which does not divide the ",
              config.num_attention_heads, " of 'num_attention_heads'");
  config.head_dim = config.hidden_size / config.num_attention_heads;
  reader.read_if_there("head_dim", config.head_dim);
  TORCH_CHECK(config.head_dim > 0 && config.head_dim % 2 == 0, file, ": 'head_dim' is ", config.head_dim,
              ", and must be even");
  reader.read_if_there("max_position_embeddings", config.max_position_embeddings);
  // What Hugging Face takes for absent keys.
  config.rms_norm_eps = 1e-6;
  reader.read_if_there("rms_norm_eps", config.rms_norm_eps);
  reader.read_if_there("initializer_range", config.initializer_range);
  reader.read_if_there("tie_word_embeddings", config.tie_word_embeddings);
  reader.read_if_there("attention_bias", config.attention_bias);
  reader.read_if_there("mlp_bias", config.mlp_bias);
  read_rope(json, file, config);
  return config;
}

std::string config_json(const LlamaConfig& config, const std::string& source) {
  auto json = source.empty() ? as_json(config) : read_json(source);
  json.erase("torch_dtype");  // the older name
  json["dtype"] = "float32";
  return json.dump(2) + '\n';
}

}  // namespace lockstep::examples
