// State of a parameter by the names Python gives it in a state dict: what is sent between ranks and written to files,
// whichever class keeps it.
#pragma once

#include <torch/optim/optimizer.h>

#include <map>
#include <string>

#include "lockstep/optim/update.h"

namespace lockstep::optim {

/// "step", a float in a tensor, where steps are counted, and "exp_avg" and so on.
using NamedState = std::map<std::string, at::Tensor>;

/// The parameter's state in one of libtorch's or this folder's optimizers: the tensors themselves, not copies; empty if
/// it has none. Throws if the optimizer is not derived from one of the eight, naming its type.
NamedState named_state(const torch::optim::Optimizer& optimizer, const at::Tensor& parameter);

/// Gives it a copy, on the parameter's device and of its dtype and layout. Empty: forgets the state. Throws on unknown
/// names and other sizes, having changed nothing.
void load_named_state(torch::optim::Optimizer& optimizer, const at::Tensor& parameter, const NamedState& state);

namespace detail {

/// What the state of a rule consists of.
struct StateShape {
  const char* rule = "";
  std::array<const char*, kSlotCount> slots = {};
  bool counts_steps = true;

  template <class Rule>
  static StateShape of() {
    return {Rule::kName, Rule::kSlots, Rule::kCountsSteps};
  }
};

NamedState to_named(const StateShape& shape, const StateRef& state);
/// Checked, copied and laid out for the parameter. `who` starts messages.
SlotState from_named(const StateShape& shape, const NamedState& state, const at::Tensor& parameter,
                     const std::string& who);

}  // namespace detail
}  // namespace lockstep::optim
