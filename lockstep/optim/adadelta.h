// Adadelta.
#pragma once

#include "lockstep/optim/update.h"

namespace lockstep::optim {

/// Python's arguments of torch.optim.Adadelta.
struct AdadeltaOptions {
  double lr = 1.0;
  double rho = 0.9;
  double eps = 1e-6;
  double weight_decay = 0;
  bool maximize = false;

  bool operator==(const AdadeltaOptions&) const = default;
  template <class Self, class Visit>
  static void visit(Self& options, Visit visit) {
    visit("lr", options.lr);
    visit("rho", options.rho);
    visit("eps", options.eps);
    visit("weight_decay", options.weight_decay);
    visit("maximize", options.maximize);
  }
};

struct AdadeltaRule {
  using Options = AdadeltaOptions;
  static constexpr const char* kName = "Adadelta";
  static constexpr std::array<const char*, kSlotCount> kSlots = {"square_avg", "acc_delta"};
  static constexpr bool kCountsSteps = true;
  static constexpr bool kTakesSparse = false;

  static void check(const Options& options);
  static void update(ParameterUpdates updates, const Options& options);
};

}  // namespace lockstep::optim
