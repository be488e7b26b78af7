#include "examples/gpt/options.h"

#include <CLI/CLI.hpp>

namespace lockstep::examples {
namespace {

const CLI::Validator kDevice(
    [](const std::string& text) {
      const bool is_numbered =
          text.size() > 5 && text.starts_with("cuda:") && text.find_first_not_of("0123456789", 5) == std::string::npos;
      return text == "cpu" || text == "cuda" || is_numbered ? "" : "must be cpu, cuda or cuda:N, not '" + text + "'";
    },
    "cpu|cuda|cuda:N");

}  // namespace

std::optional<Options> parse_options(int argc, char** argv, int& exit_code) {
  Options options;
  CLI::App app("Trains a small GPT on tales about animals, with DistributedDataParallel, and lets it tell one.", "gpt");
  // The last one counts: `make demo ARGS="--ranks 4"`.
  app.option_defaults()->take_last()->always_capture_default();
  app.add_option("--ranks", options.ranks, "processes that train together; starts lockstep-run unless a launcher did")
      ->check(CLI::Range(1, 64))
      ->default_str("1");
  app.add_option("--backend", options.backend, "shm, gloo, nccl, cpu:gloo,cuda:nccl, …")->default_str("the fastest");
  app.add_option("--device", options.device, "where to compute; cuda: the GPU of the rank's number")->check(kDevice);
  app.add_option("--steps", options.steps, "optimizer steps")->check(CLI::Range(1, 1'000'000));
  app.add_option("--batch-size", options.batch_size, "sequences per step, of all ranks together")
      ->check(CLI::Range(1, 65536));
  app.add_option("--learning-rate,--lr", options.learning_rate, "at its highest")->check(CLI::Range(1e-8, 1.0));
  app.add_option("--zero-stage", options.zero_stage,
                 "what ranks share: 0 nothing, 1 the optimizer's state, 2 gradients too")
      ->check(CLI::Range(0, 2));
  app.add_option("--seed", options.seed, "of weights, batches and the tale at the end")
      ->check(CLI::Range(int64_t{0}, INT64_MAX));
  app.add_option("--progress", options.progress, "bar redraws one line; auto: bar on a terminal, else lines")
      ->check(CLI::IsMember({"auto", "bar", "lines", "none"}));
  try {
    app.parse(argc, argv);
    return options;
  } catch (const CLI::ParseError& error) {
    exit_code = app.exit(error) == 0 ? 0 : 2;
    return std::nullopt;
  }
}

}  // namespace lockstep::examples
