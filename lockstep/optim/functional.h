// Functional optimizers: their step is given the gradients, and takes none from the parameters. That is what steps
// inside of DDP's backward need, when a bucket's gradients are there and the rest is not.
//
// One group of parameters, the list of which may be empty. Steps whose gradients belong to different parameters may run
// at the same time; anything else is for one thread.
#pragma once

#include <torch/optim/optimizer.h>

#include <string>
#include <vector>

#include "lockstep/optim/group_options.h"
#include "lockstep/optim/named_state.h"

namespace lockstep::optim {

class FunctionalOptimizer {
 public:
  explicit FunctionalOptimizer(std::vector<at::Tensor> parameters);
  virtual ~FunctionalOptimizer() = default;
  FunctionalOptimizer(const FunctionalOptimizer&) = delete;
  FunctionalOptimizer& operator=(const FunctionalOptimizer&) = delete;

  /// Of the type: "AdamW".
  virtual std::string name() const = 0;
  const std::vector<at::Tensor>& parameters() const { return parameters_; }

  /// One gradient for each parameter. Where it is undefined, the parameter stays as it is and no state is made.
  virtual void step(const std::vector<at::Tensor>& gradients) = 0;

  /// What the next step uses. A GroupOptions: its learning rate can be set here.
  virtual torch::optim::OptimizerOptions& options() = 0;
  /// Takes options of an ordinary optimizer of this name, libtorch's or ours, as schedulers have changed them. What
  /// libtorch's do not know (maximize) keeps its value. Throws on those of another optimizer.
  virtual void set_options(const torch::optim::OptimizerOptions& options) = 0;

  /// As named_state() gives it: the tensors themselves, not copies; empty if the parameter has had no gradient.
  virtual NamedValues state(std::size_t index) const = 0;
  /// Takes a copy, on the parameter's device and of its dtype and layout. Empty: forgets the state. Throws on unknown
  /// names and other sizes, having changed nothing.
  virtual void load_state(std::size_t index, const NamedValues& state) = 0;

 protected:
  /// Throws unless there is one for each parameter.
  void check_count(const std::vector<at::Tensor>& gradients) const;
  void check_index(std::size_t index) const;

 private:
  std::vector<at::Tensor> parameters_;
};

/// The functional form of a rule.
template <class Rule>
class Functional final : public FunctionalOptimizer {
 public:
  using Options = typename Rule::Options;

  explicit Functional(std::vector<at::Tensor> parameters, Options options = {});

  std::string name() const override { return Rule::kName; }
  void step(const std::vector<at::Tensor>& gradients) override;
  GroupOptions<Options>& options() override { return options_; }
  void set_options(const torch::optim::OptimizerOptions& options) override;
  NamedValues state(std::size_t index) const override;
  void load_state(std::size_t index, const NamedValues& state) override;

 private:
  GroupOptions<Options> options_;
  // One for each parameter from the start, so that concurrent steps share nothing.
  std::vector<SlotState> states_;
};

using FunctionalAdadelta = Functional<AdadeltaRule>;
using FunctionalAdagrad = Functional<AdagradRule>;
using FunctionalAdam = Functional<AdamRule>;
using FunctionalAdamax = Functional<AdamaxRule>;
using FunctionalAdamW = Functional<AdamWRule>;
using FunctionalRMSprop = Functional<RMSpropRule>;
using FunctionalRprop = Functional<RpropRule>;
using FunctionalSGD = Functional<SGDRule>;

}  // namespace lockstep::optim
