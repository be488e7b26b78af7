// Whose state it is, as far as its names tell: files do not say which optimizer wrote them. Internal to state and
// the layers above it.
#pragma once

#include <torch/optim/optimizer.h>

#include <string>

#include "lockstep/state/named_values.h"

namespace lockstep::detail {

/// A slot that is not in use: libtorch writes an undefined tensor, Python None.
bool is_unused(const c10::IValue& value);

/// "state of Adam or AdamW ('exp_avg', 'exp_avg_sq', 'step')".
std::string kind_of(const NamedValues& state);

/// Throws, naming both kinds, if `taken`, which an optimizer of type `loader` made of `given`, lacks some of it: it
/// would go on without.
void check_nothing_is_dropped(const NamedValues& given, const torch::optim::OptimizerParamState& taken,
                              const std::string& loader);

}  // namespace lockstep::detail
