// Adagrad. Takes sparse gradients.
#pragma once

#include "lockstep/optim/update.h"

namespace lockstep::optim {

/// Python's arguments of torch.optim.Adagrad.
struct AdagradOptions {
  double lr = 1e-2;
  double lr_decay = 0;
  double weight_decay = 0;
  double initial_accumulator_value = 0;
  double eps = 1e-10;
  bool maximize = false;

  bool operator==(const AdagradOptions&) const = default;
  template <class Self, class Visit>
  static void visit(Self& options, Visit visit) {
    visit("lr", options.lr);
    visit("lr_decay", options.lr_decay);
    visit("weight_decay", options.weight_decay);
    visit("initial_accumulator_value", options.initial_accumulator_value);
    visit("eps", options.eps);
    visit("maximize", options.maximize);
  }
};

struct AdagradRule {
  using Options = AdagradOptions;
  static constexpr const char* kName = "Adagrad";
  static constexpr std::array<const char*, kSlotCount> kSlots = {"sum"};
  static constexpr bool kCountsSteps = true;
  static constexpr bool kTakesSparse = true;

  static void check(const Options& options);
  static void update(ParameterUpdates updates, const Options& options);
  /// The state before the first step.
  static void make_state(const at::Tensor& parameter, const StateRef& state, const Options& options);
};

}  // namespace lockstep::optim
