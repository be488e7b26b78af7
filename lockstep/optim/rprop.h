// Rprop: steps by the signs of gradients only.
#pragma once

#include <tuple>

#include "lockstep/optim/update.h"

namespace lockstep::optim {

/// Python's arguments of torch.optim.Rprop.
struct RpropOptions {
  /// The first step size; of no effect on parameters that have had a gradient.
  double lr = 1e-2;
  std::tuple<double, double> etas = {0.5, 1.2};
  std::tuple<double, double> step_sizes = {1e-6, 50};
  bool maximize = false;

  bool operator==(const RpropOptions&) const = default;
  template <class Self, class Visit>
  static void visit(Self& options, Visit visit) {
    visit("lr", options.lr);
    visit("etas", options.etas);
    visit("step_sizes", options.step_sizes);
    visit("maximize", options.maximize);
  }
};

struct RpropRule {
  using Options = RpropOptions;
  static constexpr const char* kName = "Rprop";
  static constexpr std::array<const char*, kSlotCount> kSlots = {"prev", "step_size"};
  static constexpr bool kCountsSteps = true;
  static constexpr bool kTakesSparse = false;

  static void check(const Options& options);
  static void update(ParameterUpdates updates, const Options& options);
};

}  // namespace lockstep::optim
