#include "examples/common/training.h"

#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <numbers>
#include <optional>

namespace lockstep::examples {
namespace {

constexpr int64_t kReports = 100;
constexpr int64_t kValidationRows = 128;
constexpr double kLargestGradient = 1.0;

}  // namespace

Training::Training(const World& world, const TrainingOptions& options, const Corpus& corpus, const Divisible& divisible)
    : world_(world),
      options_(options),
      corpus_(corpus),
      model_(divisible.model),
      strategy_(make_strategy(world, options, divisible)) {}

Progress Training::run() {
  const bool speaks = world_.rank() == 0;
  ProgressBar bar(speaks ? options_.progress : "none");
  std::ofstream losses(speaks ? options_.losses : "");
  auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(options_.seed));
  const auto begin = std::chrono::steady_clock::now();
  const auto report_every = std::max<int64_t>(1, options_.steps / kReports);
  Progress progress{.steps = options_.steps};
  dcp::State state;
  state.add("model", *model_).add("optimizer", strategy_->optimizer(), *model_).add("batches", generator);
  std::optional<dcp::CheckpointManager> checkpoints;
  if (!options_.checkpoint.empty()) {
    checkpoints.emplace(options_.checkpoint,
                        dcp::CheckpointManagerOptions{.every = options_.checkpoint_every, .asynchronous = true});
    progress.step = checkpoints->resume(state).value_or(0);
    if (speaks && progress.step > 0) std::printf("goes on from %s\n", checkpoints->path_of(progress.step).c_str());
  }
  const auto first_step = progress.step;
  auto loss_sum = at::zeros({}, world_.device());
  int64_t rows = 0;
  double hidden_sum = 0;
  int64_t hidden_steps = 0;
  while (progress.step < options_.steps) {
    const auto batch = corpus_.training_batch(my_rows(corpus_.random_starts(options_.batch_size, generator)));
    set_learning_rate(progress.step++);
    if (progress.step == options_.die_at && world_.rank() + 1 == world_.world_size()) ::raise(SIGKILL);
    loss_sum += take_step(batch) * batch.input.size(0);
    if (checkpoints) checkpoints->save_if_due(progress.step, state);
    rows += batch.input.size(0);
    if (const auto share = strategy_->hidden_share()) {
      hidden_sum += *share;
      ++hidden_steps;
    }
    if (progress.step % report_every != 0 && progress.step != options_.steps) continue;
    progress.loss = mean_over_ranks(loss_sum, rows);
    progress.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    progress.tokens_per_second =
        static_cast<double>((progress.step - first_step) * options_.batch_size * corpus_.context()) / progress.seconds;
    if (hidden_steps > 0) progress.hidden = hidden_sum / static_cast<double>(hidden_steps);
    bar.show(progress);
    losses << progress.step << ' ' << std::hexfloat << progress.loss << std::endl;  // even if this is the last step
    loss_sum.zero_();
    rows = 0;
  }
  if (checkpoints) checkpoints->wait();
  return progress;
}

at::Tensor Training::take_step(const Batch& batch) {
  auto& optimizer = strategy_->optimizer();
  optimizer.zero_grad();
  const auto loss = loss_of(strategy_->forward(batch.input.to(world_.device())), batch.target.to(world_.device()));
  // Ranks may differ by one row: each counts as much as it has.
  strategy_->backward(loss, batch.input.size(0));
  // In double, so that losses do not tell how ranks have divided the model.
  clip_grad_norm_(optimizer, kLargestGradient, {.dtype = at::kDouble});
  optimizer.step();
  return loss.detach();
}

double Training::validate() {
  const at::NoGradGuard no_grad;
  const auto rounds = std::max<int64_t>(1, kValidationRows / options_.batch_size);
  auto sum = at::zeros({}, world_.device());
  int64_t rows = 0;
  for (const auto& starts : corpus_.validation_starts(rounds * options_.batch_size).split(options_.batch_size)) {
    const auto batch = corpus_.validation_batch(my_rows(starts));
    // The module itself: without gradients there is nothing to reduce.
    const auto scores = model_->forward(batch.input.to(world_.device()));
    sum += loss_of(scores, batch.target.to(world_.device())) * batch.input.size(0);
    rows += batch.input.size(0);
  }
  return mean_over_ranks(sum, rows);
}

at::Tensor Training::my_rows(const at::Tensor& rows) const {
  const auto group = strategy_->data_group();
  return rows.tensor_split(group->getSize())[static_cast<std::size_t>(group->getRank())];
}

at::Tensor Training::loss_of(const at::Tensor& scores, const at::Tensor& target) const {
  // Scores that are divided among ranks stay so.
  const LossParallel loss_parallel;
  const auto loss = at::cross_entropy_loss(scores.flatten(0, 1).to(at::kFloat), target.reshape({-1}));
  return is_dtensor(loss) ? DTensor(loss).full_tensor() : loss;
}

void Training::set_learning_rate(int64_t step) {
  const auto warmup = std::clamp<int64_t>(options_.steps / 4, 1, 50);
  const double way = static_cast<double>(step) / static_cast<double>(options_.steps);
  const double rise = std::min(1.0, static_cast<double>(step + 1) / static_cast<double>(warmup));
  const double fall = 0.05 + 0.95 * (1 + std::cos(std::numbers::pi * way)) / 2;
  for (auto& group : strategy_->optimizer().param_groups())
    group.options().set_lr(options_.learning_rate * rise * fall);
}

double Training::mean_over_ranks(const at::Tensor& sum, int64_t count) const {
  const auto both = at::stack({sum, at::full_like(sum, count)}).to(world_.device());
  all_reduce(both, strategy_->data_group());
  return both[0].item<double>() / both[1].item<double>();
}

}  // namespace lockstep::examples
