#include "examples/llama/options.h"

#include <CLI/CLI.hpp>

namespace lockstep::examples {

std::optional<LlamaOptions> parse_options(int argc, char** argv, int& exit_code) {
  LlamaOptions options;
  CLI::App app("Trains a Llama on tokens, with DDP, ZeRO, FSDP, tensor parallelism or both, and lets it write.",
               "llama");
  add_options(app, options);
  auto* config = app.add_option("--config", options.config, "a config.json: train such a model from random weights")
                     ->check(CLI::ExistingFile);
  app.add_option("--model", options.model, "a Hugging Face folder: go on with its weights")
      ->check(CLI::ExistingDirectory)
      ->excludes(config);
  app.add_option("--save", options.save, "write the trained model into this Hugging Face folder");
  auto* tokens = app.add_option("--tokens", options.tokens,
                                "a file of token numbers, little-endian: uint16 if vocab_size allows, else uint32")
                     ->check(CLI::ExistingFile);
  app.add_option("--text", options.text, "a file whose bytes are the tokens; without any, tales about animals")
      ->check(CLI::ExistingFile)
      ->excludes(tokens);
  app.add_option("--context", options.context, "tokens of a sequence")->check(CLI::Range(1, 1 << 20));
  app.add_option("--write", options.write, "tokens to write at the end")->check(CLI::Range(0, 1 << 20));
  app.add_flag("--checkpoint-activations", options.checkpoint_activations,
               "compute activations again in backward instead of keeping them");
  if (!parse(app, options, argc, argv, exit_code)) return std::nullopt;
  return options;
}

}  // namespace lockstep::examples
