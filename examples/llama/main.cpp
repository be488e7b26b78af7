// A real model: trains a Llama, from a Hugging Face folder or from random weights, on several ranks with DDP, ZeRO,
// FSDP, tensor parallelism or both. It is built without memory, divided, and only then filled: where ranks divide it,
// none ever has the whole.
//   build/examples/llama --ranks 2 --parallel fsdp                                     learns tales, byte by byte
//   build/examples/llama --ranks 4 --parallel fsdp+tp --config config.json --tokens tokens.bin --save folder
#include <lockstep/checkpoint/weights.h>
#include <lockstep/lockstep.h>
#include <lockstep/nn/tied_parameters.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>

#include "examples/common/start.h"
#include "examples/common/training.h"
#include "examples/llama/model.h"
#include "examples/llama/options.h"
#include "examples/llama/spelling.h"
#include "examples/llama/text.h"

namespace lockstep::examples {
namespace {

// Of DDP's buckets, as in Python.
constexpr double kBucketMb = 25;
constexpr int64_t kPromptLength = 32;

/// Attention by heads, the MLP by width, embeddings and scores by token: no rank ever has all scores.
ParallelPlan plan_of_layers() {
  const RowwiseParallel rowwise;
  const ColwiseParallel colwise;
  return {{"model.embed_tokens", rowwise},
          {"model.layers.*.self_attn.[qkv]_proj", colwise},
          {"model.layers.*.self_attn.o_proj", rowwise},
          {"model.layers.*.mlp.gate_proj", colwise},
          {"model.layers.*.mlp.up_proj", colwise},
          {"model.layers.*.mlp.down_proj", rowwise},
          {"lm_head", ColwiseParallel({.use_local_output = false})}};
}

LlamaConfig config_of(const LlamaOptions& options) {
  if (!options.model.empty()) return read_config(options.model + "/config.json");
  return options.config.empty() ? LlamaConfig() : read_config(options.config);
}

Spelling spelling_of(const LlamaOptions& options) {
  if (options.tokens.empty()) return spelling_of_bytes();
  const auto file = options.model + "/tokenizer.json";
  return std::filesystem::exists(file) ? read_spelling(file) : Spelling();
}

/// Gives a model that is divided already its weights. Collective.
void fill(torch::nn::Module& model, const std::string& folder) {
  if (folder.empty()) return fill_one_by_one(model);
  // Older folders have more than a model needs: frequencies, which follow from the configuration.
  const auto loaded = load_weights(model, folder, {.strict = false, .casts = true});
  TORCH_CHECK(loaded.missing.empty(), folder, " lacks '", loaded.missing.front(), "' and ", loaded.missing.size() - 1,
              " other tensors of the model");
}

/// As a Hugging Face folder, with what else is in the one it came from. Collective.
void save(const torch::nn::Module& model, const LlamaConfig& config, const LlamaOptions& options) {
  const auto source = options.model.empty() ? options.config : options.model + "/config.json";
  std::map<std::string, std::string> texts = {{"config.json", config_json(config, source)}};
  if (!options.model.empty()) {
    for (const auto& entry : std::filesystem::directory_iterator(options.model)) {
      const auto name = entry.path().filename().string();
      if (!name.starts_with("tokenizer") && !name.ends_with("_map.json") && name != "generation_config.json") continue;
      std::ifstream in(entry.path(), std::ios::binary);
      texts[name] = {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
    }
  }
  save_weights(model, options.save, {.texts = texts});
}

int64_t count_parameters(const torch::nn::Module& model) {
  int64_t count = 0;
  for (const auto& parameter : unique_parameters(model)) count += parameter.numel();
  return count;
}

void train(const World& world, const LlamaOptions& options) {
  const auto config = config_of(options);
  const auto ranks_of_heads = ranks_per_layer(world, options);
  TORCH_CHECK(config.num_key_value_heads % ranks_of_heads == 0, "--parallel ", options.parallel, ": ",
              config.num_key_value_heads, " heads of keys and values cannot be divided among ", ranks_of_heads,
              " ranks");
  const auto corpus = read_corpus(
      {.tokens = options.tokens, .text = options.text, .vocab_size = config.vocab_size, .context = options.context});

  auto model = deferred_init([&] { return LlamaForCausalLM(config); }, {.device = world.device()});
  model->model->checkpoints_activations = options.checkpoint_activations;
  const auto parameters = count_parameters(*model);
  Training training(world, options, corpus,
                    {.model = model.ptr(),
                     .blocks = model->model->layers->children(),
                     .layers = plan_of_layers(),
                     .fill = [&](auto& module) { fill(module, options.model); },
                     .bucket_cap_mb = kBucketMb});
  const bool speaks = world.rank() == 0;
  const auto first_loss = training.validate();
  if (speaks) {
    std::printf("Llama of %lld parameters, %lld of them here, learns %lld tokens on %d rank%s, %s\n",
                static_cast<long long>(parameters), static_cast<long long>(count_parameters(*model)),
                static_cast<long long>(corpus.training().numel()), world.world_size(),
                world.world_size() == 1 ? "" : "s", world.device().str().c_str());
    std::printf("held-out tokens at first: loss %.3f, perplexity %.2f\n", first_loss, std::exp(first_loss));
    std::fflush(stdout);
  }
  const auto last = training.run();
  const auto final_loss = training.validate();
  if (!options.save.empty()) save(*model, config, options);

  const auto prompt = corpus.validation().slice(0, 0, kPromptLength);
  const auto written = write(*model, prompt.to(world.device()),
                             {.count = options.write, .context = options.context, .seed = options.seed});
  if (!speaks) return;
  const auto spelling = spelling_of(options);
  std::printf("%lld steps in %.1f s\nheld-out tokens: loss %.4f, perplexity %.3f\n\n%s|%s\n",
              static_cast<long long>(last.step), last.seconds, final_loss, std::exp(final_loss),
              spell(prompt, spelling).c_str(), spell(written, spelling).c_str());
  std::fflush(stdout);
}

}  // namespace
}  // namespace lockstep::examples

int main(int argc, char** argv) {
  using namespace lockstep::examples;
  int exit_code = 0;
  const auto options = parse_options(argc, argv, exit_code);
  if (!options) return exit_code;
  return start("llama", *options, argc, argv, [&](const auto& world) { train(world, *options); });
}
