// config.json of Hugging Face: what is read, and what is refused by name.
#include "examples/llama/config.h"

#include <fstream>

#include "lockstep/testing/gtest.h"
#include "lockstep/testing/temp_dir.h"

namespace lockstep::examples {
namespace {

using lockstep::testing::expect_error;
using lockstep::testing::TempDir;

LlamaConfig read(const std::string& more) {
  const TempDir folder;
  std::ofstream(folder.file("config.json")) << R"({"model_type": "llama", "vocab_size": 32000, "hidden_size": 512,
      "intermediate_size": 1024, "num_hidden_layers": 3, "num_attention_heads": 8)"
                                            << more << "}";
  return read_config(folder.file("config.json"));
}

TEST(LlamaConfig, TakesDefaultsOfHuggingFace) {
  const auto config = read("");
  EXPECT_EQ(config.num_key_value_heads, 8);
  EXPECT_EQ(config.head_dim, 64);
  EXPECT_EQ(config.rms_norm_eps, 1e-6);
  EXPECT_EQ(config.rope_theta, 10000);
  EXPECT_FALSE(config.rope_scaling || config.tie_word_embeddings || config.attention_bias || config.mlp_bias);
}

TEST(LlamaConfig, ReadsRotationsOfOldAndNewReleases) {
  for (const char* rope : {R"(, "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 32,)",
                           R"(, "rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", "factor": 32,)"}) {
    const auto config = read(std::string(rope) + R"("low_freq_factor": 1, "high_freq_factor": 4,
                                                    "original_max_position_embeddings": 8192})");
    EXPECT_EQ(config.rope_theta, 5e5);
    ASSERT_TRUE(config.rope_scaling);
    EXPECT_EQ(config.rope_scaling->factor, 32);
  }
  EXPECT_FALSE(read(R"(, "rope_scaling": null)").rope_scaling);
}

TEST(LlamaConfig, RefusesWhatTheModelHasNot) {
  const auto expect_refused = [](const std::string& more, const std::string& key) {
    expect_error([&] { read(more); }, {"config.json", key});
  };
  expect_refused(R"(, "model_type": "mistral")", "model_type");
  expect_refused(R"(, "hidden_act": "gelu")", "hidden_act");
  expect_refused(R"(, "attention_dropout": 0.1)", "attention_dropout");
  expect_refused(R"(, "rope_scaling": {"rope_type": "yarn"})", "yarn");
  expect_refused(R"(, "rope_scaling": {"type": "linear"})", "linear");
  expect_refused(R"(, "rope_scaling": {"rope_type": "llama3"})", "factor");
  expect_refused(R"(, "num_key_value_heads": 3)", "num_key_value_heads");
  expect_refused(R"(, "head_dim": 5)", "head_dim");
  expect_refused(R"(, "vocab_size": "many")", "vocab_size");
  expect_refused(R"(, "quantization_config": {})", "quantization_config");
  expect_refused(",", "JSON");
}

TEST(LlamaConfig, IsWrittenAsItWasRead) {
  const TempDir folder;
  const auto file = folder.file("config.json");
  const LlamaConfig config{.hidden_size = 96, .num_key_value_heads = 1, .rope_scaling = RopeScaling{.factor = 16}};
  std::ofstream(file) << config_json(config);
  const auto again = read_config(file);
  EXPECT_EQ(again.hidden_size, 96);
  EXPECT_EQ(again.num_key_value_heads, 1);
  EXPECT_EQ(again.rope_scaling.value().factor, 16);
  // Keys that only others know stay.
  std::ofstream(file) << R"({"eos_token_id": 7, "torch_dtype": "bfloat16"})";
  EXPECT_EQ(config_json(config, file), "{\n  \"eos_token_id\": 7,\n  \"dtype\": \"float32\"\n}\n");
}

}  // namespace
}  // namespace lockstep::examples
