// Which dims an operator reduces, and the plan of one that needs them whole. Internal to dtensor.
#pragma once

#include <vector>

#include "lockstep/dtensor/rule.h"

namespace lockstep::detail {

struct Reduction {
  std::vector<bool> reduced;  // by dim of the first operand
  bool keeps_dims = false;

  bool reduces(int64_t dim) const { return reduced[static_cast<std::size_t>(dim)]; }
  /// REQUIRES: it is not reduced, or dims are kept.
  int64_t result_dim(int64_t dim) const;
  /// Of a tensor of `sizes`.
  Sizes result_sizes(const Sizes& sizes) const;
  /// How many elements of a tensor of `sizes` become one.
  int64_t count(const Sizes& sizes) const;
  /// Axes that cut a reduced dim.
  std::vector<int64_t> axes_of(const Layout& layout) const;
};

/// Of dims as operators name them: an int or a list; all if there is none, or an empty list.
Reduction reduction_of(const RuleCall& call, const c10::IValue* dims, bool keeps_dims);
Reduction reduction_of_all(const RuleCall& call);

/// Reduced dims are whole on every rank and terms are summed; a cut of another dim is a cut of all `result_count`
/// results.
Plan whole_dims_plan(const RuleCall& call, const Reduction& reduction, std::size_t result_count = 1);

}  // namespace lockstep::detail
