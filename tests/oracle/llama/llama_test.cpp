// The Llama of the examples against Hugging Face's: the same folder gives the same logits and gradients.
#include <fstream>

#include "examples/llama/model.h"
#include "lockstep/testing/gtest.h"
#include "tests/support/oracle_reference.h"

namespace lockstep {
namespace {

using examples::LlamaForCausalLM;
using oracle::at_key;
using oracle::tensors_by_name;
using testing::check_equal;

constexpr testing::Tolerance kTolerance{.relative = 1e-5, .absolute = 1e-5};

examples::LlamaConfig config_of(const std::string& json) {
  const testing::TempDir folder;
  std::ofstream(folder.file("config.json")) << json;
  return examples::read_config(folder.file("config.json"));
}

LlamaForCausalLM model_of(const c10::IValue& reference) {
  LlamaForCausalLM model(config_of(at_key(reference, "config").toStringRef()));
  const at::NoGradGuard no_grad;
  auto weights = tensors_by_name(at_key(reference, "weights"));
  if (model->model->config.tie_word_embeddings) weights["lm_head.weight"] = weights.at("model.embed_tokens.weight");
  for (auto& parameter : model->named_parameters()) parameter.value().copy_(weights.at(parameter.key()));
  EXPECT_EQ(weights.size(), model->named_parameters().size());
  return model;
}

/// As transformers has it: of each token but the first, from those before it.
at::Tensor loss_of(const at::Tensor& logits, const at::Tensor& tokens) {
  return at::cross_entropy_loss(logits.slice(1, 0, -1).flatten(0, 1), tokens.slice(1, 1).flatten());
}

TEST(LlamaOracle, LogitsAndGradientsAgreeWithTransformers) {
  const auto references = oracle::run_reference("llama/llama_reference.py");
  if (references.isNone()) GTEST_SKIP() << "there is no Python with transformers to compare with";
  for (const auto& entry : references.toGenericDict()) {
    const auto& name = entry.key().toStringRef();
    for (const bool checkpoints_activations : {false, true}) {
      auto model = model_of(entry.value());
      model->model->checkpoints_activations = checkpoints_activations;
      const auto tokens = at_key(entry.value(), "tokens").toTensor();
      const auto logits = model(tokens);
      const auto loss = loss_of(logits, tokens);
      loss.backward();
      check_equal(name + ", logits", logits.detach(), at_key(entry.value(), "logits").toTensor(), kTolerance);
      check_equal(name + ", loss", loss.detach(), at_key(entry.value(), "loss").toTensor(), kTolerance);
      const auto parameters = model->named_parameters();
      for (const auto& [parameter, gradient] : tensors_by_name(at_key(entry.value(), "gradients"))) {
        check_equal(name + ", gradient of " + parameter, parameters[parameter].grad(), gradient, kTolerance);
      }
    }
  }
}

}  // namespace
}  // namespace lockstep
