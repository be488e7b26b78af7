// Adam and AdamW: one rule, which decays weights in the gradient or apart from it.
#pragma once

#include <tuple>

#include "lockstep/optim/update.h"

namespace lockstep::optim {

/// Python's arguments of torch.optim.Adam.
struct AdamOptions {
  double lr = 1e-3;
  std::tuple<double, double> betas = {0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 0;
  bool amsgrad = false;
  bool maximize = false;
  /// True: as AdamW.
  bool decoupled_weight_decay = false;

  bool operator==(const AdamOptions&) const = default;
  template <class Self, class Visit>
  static void visit(Self& options, Visit visit) {
    visit("lr", options.lr);
    visit("betas", options.betas);
    visit("eps", options.eps);
    visit("weight_decay", options.weight_decay);
    visit("amsgrad", options.amsgrad);
    visit("maximize", options.maximize);
    visit("decoupled_weight_decay", options.decoupled_weight_decay);
  }
};

/// Python's arguments of torch.optim.AdamW.
struct AdamWOptions {
  double lr = 1e-3;
  std::tuple<double, double> betas = {0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 1e-2;
  bool amsgrad = false;
  bool maximize = false;

  bool operator==(const AdamWOptions&) const = default;
  template <class Self, class Visit>
  static void visit(Self& options, Visit visit) {
    visit("lr", options.lr);
    visit("betas", options.betas);
    visit("eps", options.eps);
    visit("weight_decay", options.weight_decay);
    visit("amsgrad", options.amsgrad);
    visit("maximize", options.maximize);
  }
};

struct AdamRule {
  using Options = AdamOptions;
  static constexpr const char* kName = "Adam";
  static constexpr std::array<const char*, kSlotCount> kSlots = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
  static constexpr bool kCountsSteps = true;
  static constexpr bool kTakesSparse = false;

  static void check(const Options& options);
  static void update(ParameterUpdates updates, const Options& options);
};

struct AdamWRule {
  using Options = AdamWOptions;
  static constexpr const char* kName = "AdamW";
  static constexpr std::array<const char*, kSlotCount> kSlots = AdamRule::kSlots;
  static constexpr bool kCountsSteps = true;
  static constexpr bool kTakesSparse = false;

  static void check(const Options& options);
  static void update(ParameterUpdates updates, const Options& options);
};

}  // namespace lockstep::optim
