// The optimizers: Python's of the same names, usable wherever a torch::optim::Optimizer is (schedulers, archives,
// ZeroRedundancyOptimizer). They differ from libtorch's by their options, which are plain structs, by having all of
// Python's (maximize), and by updating a group in one call of a fused kernel where there is one.
//
// State is kept as libtorch's types (torch::optim::AdamWParamState) where it has them, and archives are
// interchangeable with the class of that name, both ways.
#pragma once

#include <vector>

#include "lockstep/optim/group_options.h"

namespace lockstep::optim {

/// What the classes below have in common.
template <class Rule>
class RuleOptimizer : public torch::optim::Optimizer {
 public:
  using Options = typename Rule::Options;

  /// Groups without options get the defaults. Throws what Python complains about, in the defaults and in each group.
  explicit RuleOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& param_groups, Options defaults = {});
  explicit RuleOptimizer(std::vector<at::Tensor> parameters, Options defaults = {});
  /// The learning rate alone, as Python takes it: SGD(parameters, 0.1). A template, so that {} is options.
  template <LearningRate Number>
  RuleOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& param_groups, Number lr)
      : RuleOptimizer(param_groups, with_lr<Options>(lr)) {}
  template <LearningRate Number>
  RuleOptimizer(std::vector<at::Tensor> parameters, Number lr)
      : RuleOptimizer(std::move(parameters), with_lr<Options>(lr)) {}

  /// As libtorch's, except that the options a group brings are kept: libtorch's gives it the defaults instead if it
  /// does not know their type. Called through a reference to the base class it still does.
  void add_param_group(const torch::optim::OptimizerParamGroup& group);

  /// Updates the parameters that have a gradient; the others, and their state, stay as they are. Changes none if it
  /// refuses one of the gradients.
  at::Tensor step(LossClosure closure = nullptr) override;

  void save(torch::serialize::OutputArchive& archive) const override;
  /// Replaces options and state. Changes nothing if the archive does not fit the parameter groups.
  void load(torch::serialize::InputArchive& archive) override;

 private:
  /// What libtorch's options lack comes from the defaults.
  Options options_of(const torch::optim::OptimizerParamGroup& group) const;
};

// Classes, not aliases: their names are in messages, and programs may declare them.
struct Adadelta : RuleOptimizer<AdadeltaRule> {
  using RuleOptimizer::RuleOptimizer;
};
/// Has state from its construction, as Python's.
struct Adagrad : RuleOptimizer<AdagradRule> {
  using RuleOptimizer::RuleOptimizer;
};
struct Adam : RuleOptimizer<AdamRule> {
  using RuleOptimizer::RuleOptimizer;
};
struct Adamax : RuleOptimizer<AdamaxRule> {
  using RuleOptimizer::RuleOptimizer;
};
struct AdamW : RuleOptimizer<AdamWRule> {
  using RuleOptimizer::RuleOptimizer;
};
struct RMSprop : RuleOptimizer<RMSpropRule> {
  using RuleOptimizer::RuleOptimizer;
};
struct Rprop : RuleOptimizer<RpropRule> {
  using RuleOptimizer::RuleOptimizer;
};
struct SGD : RuleOptimizer<SGDRule> {
  using RuleOptimizer::RuleOptimizer;
};

}  // namespace lockstep::optim
