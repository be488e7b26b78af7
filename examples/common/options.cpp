#include "examples/common/options.h"

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

/// Options that go together, or not. --zero-stage alone means --parallel zero, which alone means all that ZeRO shares.
void complete(TrainingOptions& options, bool has_parallel, bool has_stage) {
  const auto refuse_if = [](bool is_wrong, const std::string& what) {
    if (is_wrong) throw CLI::ValidationError(what);
  };
  if (!has_parallel && options.zero_stage > 0) options.parallel = "zero";
  if (options.parallel == "zero" && !has_stage) options.zero_stage = 2;
  refuse_if(options.parallel == "zero" && options.zero_stage == 0, "--parallel zero: --zero-stage must be 1 or 2");
  refuse_if(options.parallel != "zero" && options.zero_stage > 0, "--zero-stage: only with --parallel zero");
  refuse_if(options.precision != "float32" && !options.is_sharded(),
            "--precision " + options.precision + ": only with --parallel fsdp, hybrid or fsdp+tp");
}

}  // namespace

void add_options(CLI::App& app, TrainingOptions& options) {
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
  app.add_option("--parallel", options.parallel,
                 "what ranks divide: ddp nothing but the batch, zero the optimizer's state and "
                 "gradients, fsdp all, hybrid all between pairs of ranks, tp every layer, fsdp+tp "
                 "layers between pairs of ranks and the rest among the pairs")
      ->check(CLI::IsMember({"ddp", "zero", "fsdp", "hybrid", "tp", "fsdp+tp"}));
  app.add_option("--zero-stage", options.zero_stage,
                 "what ranks share: 0 nothing, 1 the optimizer's state, 2 gradients too")
      ->check(CLI::Range(0, 2));
  app.add_option("--precision", options.precision, "in which fsdp computes; shards and sums stay float32")
      ->check(CLI::IsMember({"float32", "bf16"}));
  app.add_option("--seed", options.seed, "of weights, batches and the text at the end")
      ->check(CLI::Range(int64_t{0}, INT64_MAX));
  app.add_option("--progress", options.progress, "bar redraws one line; auto: bar on a terminal, else lines")
      ->check(CLI::IsMember({"auto", "bar", "lines", "none"}));
  app.add_option("--losses", options.losses, "write the loss of every report to this file, all digits of it");
  app.add_option("--checkpoint", options.checkpoint,
                 "save to this folder while training goes on, and go on from what is there, with any number of ranks "
                 "and any --parallel");
  app.add_option("--checkpoint-every", options.checkpoint_every, "steps between saves")
      ->check(CLI::Range(1, 1'000'000));
  app.add_option("--die-at", options.die_at, "to see that: the last rank kills itself before this step")
      ->check(CLI::Range(0, 1'000'000));
}

bool parse(CLI::App& app, TrainingOptions& options, int argc, char** argv, int& exit_code) {
  try {
    app.parse(argc, argv);
    complete(options, app.count("--parallel") > 0, app.count("--zero-stage") > 0);
    return true;
  } catch (const CLI::ParseError& error) {
    exit_code = app.exit(error) == 0 ? 0 : 2;
    return false;
  }
}

}  // namespace lockstep::examples
