// What of a ZeroOptimizer its savers and loaders may touch. Internal to zero.
#pragma once

#include "lockstep/zero/optimizer.h"

namespace lockstep::detail {

class StateAccess {
 public:
  /// Brings options and groups up to date first.
  static std::vector<StatePiece> pieces(ZeroOptimizer& optimizer);
  static std::vector<at::Tensor> parameters(const ZeroOptimizer& optimizer) { return optimizer.all_parameters(); }
  static std::vector<std::string> names(const ZeroOptimizer& optimizer) { return optimizer.parameter_names(); }
  static OptimizerStateDict groups(const ZeroOptimizer& optimizer) { return optimizer.exposed_groups(); }
  static std::string who(const ZeroOptimizer& optimizer) { return optimizer.who(); }
  static void set_consolidated(ZeroOptimizer& optimizer, std::optional<OptimizerStateDict> dict) {
    optimizer.set_consolidated(std::move(dict));
  }
  /// Throws if the optimizer could not load such state, without tensors larger than an element.
  static void check_kind(const ZeroOptimizer& optimizer, const OptimizerStateDict& dict) { optimizer.check_kind(dict); }
  /// Ranks compare how often they have loaded: all begin to count anew.
  static void forget_loads(ZeroOptimizer& optimizer) { optimizer.loads_ = 0; }
  static void prepare_to_load(ZeroOptimizer& optimizer) { optimizer.prepare_for_state("loading state"); }
  static void load_from(ZeroOptimizer& optimizer, const OptimizerStateDict& groups, const StateSource& source,
                        const std::string& description);
};

}  // namespace lockstep::detail
