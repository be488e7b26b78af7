// SGD, plain and with momentum. Takes sparse gradients.
#pragma once

#include "lockstep/optim/update.h"

namespace lockstep::optim {

/// Python's arguments of torch.optim.SGD.
struct SGDOptions {
  double lr = 1e-3;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;
  bool maximize = false;

  bool operator==(const SGDOptions&) const = default;
  template <class Self, class Visit>
  static void visit(Self& options, Visit visit) {
    visit("lr", options.lr);
    visit("momentum", options.momentum);
    visit("dampening", options.dampening);
    visit("weight_decay", options.weight_decay);
    visit("nesterov", options.nesterov);
    visit("maximize", options.maximize);
  }
};

struct SGDRule {
  using Options = SGDOptions;
  static constexpr const char* kName = "SGD";
  static constexpr std::array<const char*, kSlotCount> kSlots = {"momentum_buffer"};
  static constexpr bool kCountsSteps = false;
  static constexpr bool kTakesSparse = true;

  static void check(const Options& options);
  /// Without momentum there is nothing to keep, and StateRefs may be empty.
  static bool keeps_state(const Options& options) { return options.momentum != 0; }
  /// A parameter's first momentum is its gradient: dampening starts with the second step.
  static void update(ParameterUpdates updates, const Options& options);
};

}  // namespace lockstep::optim
