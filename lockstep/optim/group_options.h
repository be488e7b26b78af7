// Options of a rule as libtorch's optimizers carry them, one set per parameter group: learning-rate schedulers change
// them there, and archives hold them under libtorch's keys.
#pragma once

#include <torch/optim/optimizer.h>

#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/optim/rules.h"

namespace lockstep::optim {

/// AdamWOptions and the like, with their members, where an OptimizerOptions is asked for.
template <class Options>
struct GroupOptions final : torch::optim::OptimizerCloneableOptions<GroupOptions<Options>>, Options {
  explicit GroupOptions(Options options = {}) : Options(std::move(options)) {}

  double get_lr() const override { return this->lr; }
  void set_lr(const double lr) override { this->lr = lr; }
  /// What the archive does not hold keeps its value: libtorch's own archives know no maximize.
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

template <class Number>
concept LearningRate = std::is_arithmetic_v<Number> && !std::is_same_v<Number, bool>;

/// The defaults, with another learning rate.
template <class Options>
Options with_lr(double lr) {
  Options options;
  options.lr = lr;
  return options;
}

/// Options of one parameter group. They are complete: unlike Python's, they do not take over what they do not name.
///   torch::optim::OptimizerParamGroup(biases, group_options(AdamWOptions{.lr = 1e-3, .weight_decay = 0}))
template <class Options>
std::unique_ptr<torch::optim::OptimizerOptions> group_options(const Options& options) {
  return std::make_unique<GroupOptions<Options>>(options);
}

/// The values of a GroupOptions<Options>, or of libtorch's options for the optimizer of that name, which lack some
/// (maximize): those are taken from `otherwise`. Throws on options of other optimizers, naming their type.
template <class Options>
Options options_from(const torch::optim::OptimizerOptions& options, Options otherwise = {});

/// Their numbers by name, such as "lr" and "momentum": all of the optimizers here and of libtorch's that have the same,
/// of others the learning rate, if they have one.
std::vector<std::pair<const char*, double>> numbers_of(const torch::optim::OptimizerOptions& options);

}  // namespace lockstep::optim
