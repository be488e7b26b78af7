// RMSprop, plain, centered and with momentum.
#pragma once

#include "lockstep/optim/update.h"

namespace lockstep::optim {

/// Python's arguments of torch.optim.RMSprop.
struct RMSpropOptions {
  double lr = 1e-2;
  double alpha = 0.99;
  double eps = 1e-8;
  double weight_decay = 0;
  double momentum = 0;
  bool centered = false;
  bool maximize = false;

  bool operator==(const RMSpropOptions&) const = default;
  template <class Self, class Visit>
  static void visit(Self& options, Visit visit) {
    visit("lr", options.lr);
    visit("alpha", options.alpha);
    visit("eps", options.eps);
    visit("weight_decay", options.weight_decay);
    visit("momentum", options.momentum);
    visit("centered", options.centered);
    visit("maximize", options.maximize);
  }
};

struct RMSpropRule {
  using Options = RMSpropOptions;
  static constexpr const char* kName = "RMSprop";
  static constexpr std::array<const char*, kSlotCount> kSlots = {"square_avg", "momentum_buffer", "grad_avg"};
  static constexpr bool kCountsSteps = true;
  static constexpr bool kTakesSparse = false;

  static void check(const Options& options);
  static void update(ParameterUpdates updates, const Options& options);
};

}  // namespace lockstep::optim
