// How ranks share the work of training one model: what differs between DDP, ZeRO, FSDP and tensor parallelism. The loop
// in training.cpp is the same for all.
#pragma once

#include <lockstep/lockstep.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "examples/common/language_model.h"
#include "examples/common/options.h"

namespace lockstep::examples {

/// Each parameter gets the value it was built with. The whole of one that ranks divide is gone before the next. Local.
void fill_one_by_one(const torch::nn::Module& model);

/// A model, and what can be divided of it.
struct Divisible {
  std::shared_ptr<LanguageModel> model;
  /// Gathered one at a time where ranks divide the model.
  std::vector<std::shared_ptr<torch::nn::Module>> blocks;
  /// Where they divide layers.
  ParallelPlan layers;
  /// Gives a model that was built without memory its values, once it is divided: parameters are the rank's part then.
  std::function<void(torch::nn::Module& model)> fill = fill_one_by_one;
  /// Of DDP's buckets: small ones, so that the first all-reduce starts early in backward of a small model.
  double bucket_cap_mb = 0.5;
};

/// Among how many ranks layers are divided: each needs a part of all of them. Local.
int64_t ranks_per_layer(const World& world, const TrainingOptions& options);

class Strategy {
 public:
  virtual ~Strategy() = default;

  /// Of a training step. Collective, as all that follows.
  virtual at::Tensor forward(const at::Tensor& input) = 0;
  /// Gradients become the mean over all rows of all ranks; `loss` is the mean over this rank's `rows`.
  virtual void backward(const at::Tensor& loss, int64_t rows) = 0;
  /// Of what this rank has of the model.
  virtual torch::optim::Optimizer& optimizer() = 0;
  /// Ranks that train on other rows than this one are other members of this group: all of the world, unless ranks
  /// divide layers and so have to see the same rows.
  virtual GroupPtr data_group() const = 0;
  /// Share of the last step's communication that was hidden behind compute; none if that is not known.
  virtual std::optional<double> hidden_share() const { return std::nullopt; }
};

/// The one that `options` ask for. Takes the model over. Collective.
std::unique_ptr<Strategy> make_strategy(const World& world, const TrainingOptions& options, const Divisible& divisible);

}  // namespace lockstep::examples
