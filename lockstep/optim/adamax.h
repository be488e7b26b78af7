// Adamax: Adam by the largest gradient instead of the mean square.
#pragma once

#include <tuple>

#include "lockstep/optim/update.h"

namespace lockstep::optim {

/// Python's arguments of torch.optim.Adamax.
struct AdamaxOptions {
  double lr = 2e-3;
  std::tuple<double, double> betas = {0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 0;
  bool maximize = false;

  bool operator==(const AdamaxOptions&) const = default;
  template <class Self, class Visit>
  static void visit(Self& options, Visit visit) {
    visit("lr", options.lr);
    visit("betas", options.betas);
    visit("eps", options.eps);
    visit("weight_decay", options.weight_decay);
    visit("maximize", options.maximize);
  }
};

struct AdamaxRule {
  using Options = AdamaxOptions;
  static constexpr const char* kName = "Adamax";
  static constexpr std::array<const char*, kSlotCount> kSlots = {"exp_avg", "exp_inf"};
  static constexpr bool kCountsSteps = true;
  static constexpr bool kTakesSparse = false;

  static void check(const Options& options);
  static void update(ParameterUpdates updates, const Options& options);
};

}  // namespace lockstep::optim
