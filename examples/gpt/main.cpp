// The demo: trains a small GPT, character by character, on several ranks with DDP, ZeRO or FSDP.
//   build/examples/gpt --ranks 2                      starts lockstep-run, which starts the ranks
//   lockstep-run -n 2 build/examples/gpt              so does any other launcher; alone it is one rank
#include <lockstep/lockstep.h>
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <exception>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "examples/gpt/corpus.h"
#include "examples/gpt/model.h"
#include "examples/gpt/options.h"
#include "examples/gpt/progress_bar.h"
#include "examples/gpt/teller.h"
#include "examples/gpt/training.h"
#include "lockstep/base/str.h"

namespace lockstep::examples {
namespace {

/// Becomes lockstep-run with this program as its ranks. Returns only by throwing.
[[noreturn]] void become_launcher(const Options& options, int argc, char** argv) {
  std::vector<std::string> command = {LOCKSTEP_RUN_PATH, "-n", std::to_string(options.ranks), "--no-prefix"};
  command.insert(command.end(), argv, argv + argc);
  // Ranks write to a pipe: only we know that a terminal is behind it.
  if (options.progress == "auto" && ::isatty(STDOUT_FILENO) == 1) {
    command.insert(command.end(), {"--progress", "bar"});
  }
  std::vector<char*> arguments;
  for (auto& word : command) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  ::execv(arguments[0], arguments.data());
  throw std::runtime_error(str("cannot start ", command[0], ": build it first (make demo does)"));
}

InitOptions init_options(const Options& options) {
  InitOptions init_options{.backend = options.backend};
  if (options.device == "cpu") {
    init_options.device = at::kCPU;
    return init_options;
  }
  const int gpus = gpu_count();
  TORCH_CHECK(gpus > 0, "--device ", options.device, ": no GPU was found. Use --device cpu.");
  // Without a number init() chooses: ranks of a host take its GPUs in turn.
  if (options.device == "cuda") return init_options;
  init_options.device = at::Device(options.device);
  TORCH_CHECK(init_options.device->index() < gpus, "--device ", options.device, ": there are ", gpus, " GPUs, from 0");
  return init_options;
}

void introduce(const World& world, const Corpus& corpus, const GptImpl& model) {
  int64_t parameters = 0;
  for (const auto& parameter : model.parameters()) parameters += parameter.numel();
  const auto backend = world.group()->getBackend(world.device().type());
  std::printf("GPT of %lld parameters learns %lld characters of tales on %d rank%s, %s, over %s\n",
              static_cast<long long>(parameters), static_cast<long long>(corpus.characters()), world.world_size(),
              world.world_size() == 1 ? "" : "s", world.device().str().c_str(), backend->getBackendName().c_str());
}

void run_rank(const Options& options) {
  const auto world = init(init_options(options));
  TORCH_CHECK(options.ranks == 0 || options.ranks == world.world_size(), "--ranks ", options.ranks, ", but ",
              world.launcher(), " has started ", world.world_size());
  TORCH_CHECK(options.batch_size >= world.world_size(), "--batch-size ", options.batch_size, " leaves some of the ",
              world.world_size(), " ranks without a sequence");
  // The layers are so small that more threads would mostly wait for each other; and losses depend on no core count.
  at::set_num_threads(1);
  torch::manual_seed(static_cast<std::uint64_t>(options.seed));

  GptConfig config;
  const Corpus corpus(config.context);
  config.vocabulary = corpus.vocabulary();
  Gpt model(config);
  model->to(world.device());
  Training training(world, options, corpus, model);

  const bool speaks = world.rank() == 0;
  const double first_loss = training.validate();
  auto teller = training.copy_of_model();
  if (speaks) {
    introduce(world, corpus, *teller);
    std::printf(
        "untrained: validation loss %.3f, and it writes: %s\n", first_loss,
        one_line(tell(teller, corpus.alphabet(), {.shortest = 30, .longest = 30, .seed = options.seed})).c_str());
    std::fflush(stdout);
  }
  ProgressBar bar(speaks ? options.progress : "none");
  const auto begin = std::chrono::steady_clock::now();
  std::ofstream losses(speaks ? options.losses : "");
  const auto last = training.run([&](const Progress& progress) {
    bar.show(progress);
    losses << progress.step << ' ' << std::hexfloat << progress.loss << '\n';
  });
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  const double final_loss = training.validate();
  training.check_replicas();
  teller = training.copy_of_model();
  if (speaks) {
    std::printf("%lld steps in %.1f s", static_cast<long long>(last.step), took.count());
    if (world.world_size() > 1) std::printf("; the weights are the same on all %d ranks", world.world_size());
    if (last.hidden) std::printf("; %.0f %% of communication hidden behind compute", 100 * *last.hidden);
    std::printf("\nfinal loss %.4f, validation loss %.4f; now it writes:\n\n%s", last.loss, final_loss,
                wrap(tell(teller, corpus.alphabet(), {.seed = options.seed}), 80).c_str());
    std::fflush(stdout);
  }
  barrier(world.group());
}

}  // namespace
}  // namespace lockstep::examples

int main(int argc, char** argv) {
  using namespace lockstep::examples;
  int exit_code = 0;
  const auto options = parse_options(argc, argv, exit_code);
  if (!options) return exit_code;
  try {
    const bool has_launcher = lockstep::detect_rank_environment().launcher != "none";
    if (options->ranks > 1 && !has_launcher) become_launcher(*options, argc, argv);
    run_rank(*options);
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "gpt: %s\n", error.what_without_backtrace());
    return 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gpt: %s\n", error.what());
    return 1;
  }
  return 0;
}
