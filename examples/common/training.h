// Training on several ranks: each learns from its part of every batch. How they divide the model is the strategy's.
//
// The batch of a step is drawn alike on all ranks, and each takes its rows. So any number of ranks trains the same
// model, up to rounding.
#pragma once

#include <lockstep/lockstep.h>

#include <memory>

#include "examples/common/corpus.h"
#include "examples/common/language_model.h"
#include "examples/common/options.h"
#include "examples/common/progress_bar.h"
#include "examples/common/strategy.h"

namespace lockstep::examples {

class Training {
 public:
  /// Collective.
  Training(const World& world, const TrainingOptions& options, const Corpus& corpus, const Divisible& divisible);

  /// All steps, or those that a checkpoint leaves to be done, while rank 0 shows how far they are and writes losses
  /// where the options say. Returns the last report, the same on all ranks. Collective.
  Progress run();

  /// Mean loss per token on text that is not trained on. Collective.
  double validate();

 private:
  /// Returns the mean loss of this rank's rows.
  at::Tensor take_step(const Batch& batch);
  at::Tensor my_rows(const at::Tensor& rows) const;
  at::Tensor loss_of(const at::Tensor& scores, const at::Tensor& target) const;
  void set_learning_rate(int64_t step);
  /// The mean over all ranks, from each rank's sum and count.
  double mean_over_ranks(const at::Tensor& sum, int64_t count) const;

  const World world_;
  const TrainingOptions options_;
  const Corpus& corpus_;
  const std::shared_ptr<LanguageModel> model_;
  const std::unique_ptr<Strategy> strategy_;
};

}  // namespace lockstep::examples
