// The demo: trains a small GPT, character by character, on several ranks with DDP, ZeRO or FSDP.
//   build/examples/gpt --ranks 2                      starts lockstep-run, which starts the ranks
//   lockstep-run -n 2 build/examples/gpt              so does any other launcher; alone it is one rank
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <string>

#include "examples/common/options.h"
#include "examples/common/start.h"
#include "examples/common/training.h"
#include "examples/gpt/model.h"
#include "examples/gpt/tales_corpus.h"
#include "examples/gpt/teller.h"

namespace lockstep::examples {
namespace {

/// Every block's attention by heads, its two linear layers by width; the scores by token.
ParallelPlan layers_by_width() {
  return {{"blocks.*.attention_in", ColwiseParallel({.fused_parts = 3})},
          {"blocks.*.attention_out", RowwiseParallel()},
          {"blocks.*.mlp_in", ColwiseParallel()},
          {"blocks.*.mlp_out", RowwiseParallel()},
          {"head", ColwiseParallel({.output_layouts = Replicate()})}};
}

/// One of its own with the weights as they are: for one rank alone to use. Collective.
Gpt copy_of(const Gpt& model) {
  const at::NoGradGuard no_grad;
  const auto weights = full_state_dict(*model);
  Gpt copy(model->config);
  for (auto& parameter : copy->named_parameters()) parameter.value().copy_(weights.at(parameter.key()));
  return copy;
}

/// Throws on every rank if their weights differ in a single bit. Collective.
void check_replicas(const Gpt& model, const World& world) {
  Facts facts;
  for (const auto& [name, weight] : full_state_dict(*model)) {
    const auto bits = weight.to(at::kCPU).view(at::kInt);
    facts.emplace_back("weights of '" + name + "'", std::to_string(bits.sum().item<int64_t>()));
  }
  check_same_on_all_ranks("the trained model", facts, world.group());
}

void introduce(const World& world, const Corpus& corpus, const GptImpl& model) {
  int64_t parameters = 0;
  for (const auto& parameter : model.parameters()) parameters += parameter.numel();
  const auto backend = world.group()->getBackend(world.device().type());
  std::printf("GPT of %lld parameters learns %lld characters of tales on %d rank%s, %s, over %s\n",
              static_cast<long long>(parameters), static_cast<long long>(corpus.training().numel()), world.world_size(),
              world.world_size() == 1 ? "" : "s", world.device().str().c_str(), backend->getBackendName().c_str());
}

void train(const World& world, const TrainingOptions& options) {
  // The layers are so small that more threads would mostly wait for each other; and losses depend on no core count.
  at::set_num_threads(1);
  GptConfig config;
  const auto [alphabet, corpus] = make_tales_corpus(config.context);
  config.vocabulary = static_cast<int64_t>(alphabet.size());
  Gpt model(config);
  model->to(world.device());
  Training training(world, options, corpus,
                    {.model = model.ptr(), .blocks = model->blocks->children(), .layers = layers_by_width()});

  const bool speaks = world.rank() == 0;
  const double first_loss = training.validate();
  auto teller = copy_of(model);
  if (speaks) {
    introduce(world, corpus, *teller);
    std::printf("untrained: validation loss %.3f, and it writes: %s\n", first_loss,
                one_line(tell(teller, alphabet, {.shortest = 30, .longest = 30, .seed = options.seed})).c_str());
    std::fflush(stdout);
  }
  const auto last = training.run();
  const double final_loss = training.validate();
  check_replicas(model, world);
  teller = copy_of(model);
  if (speaks) {
    std::printf("%lld steps in %.1f s", static_cast<long long>(last.step), last.seconds);
    if (world.world_size() > 1) std::printf("; the weights are the same on all %d ranks", world.world_size());
    if (last.hidden) std::printf("; %.0f %% of communication hidden behind compute", 100 * *last.hidden);
    std::printf("\nfinal loss %.4f, validation loss %.4f; now it writes:\n\n%s", last.loss, final_loss,
                wrap(tell(teller, alphabet, {.seed = options.seed}), 80).c_str());
    std::fflush(stdout);
  }
}

}  // namespace
}  // namespace lockstep::examples

int main(int argc, char** argv) {
  using namespace lockstep::examples;
  TrainingOptions options;
  CLI::App app(
      "Trains a small GPT on tales about animals, with DDP, ZeRO, FSDP or tensor parallelism, and lets it tell one.",
      "gpt");
  add_options(app, options);
  int exit_code = 0;
  if (!parse(app, options, argc, argv, exit_code)) return exit_code;
  return start("gpt", options, argc, argv, [&](const auto& world) { train(world, options); });
}
