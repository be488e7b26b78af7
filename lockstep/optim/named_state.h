// State of a parameter by the names Python gives it in a state dict: what is sent between ranks and written to files,
// whichever class keeps it.
#pragma once

#include <torch/optim/optimizer.h>

#include <array>
#include <string>

#include "lockstep/optim/update.h"
#include "lockstep/state/named_values.h"

namespace lockstep::optim {

/// The parameter's state in one of libtorch's or this folder's optimizers: "step", an integer, where steps are counted,
/// and "exp_avg" and so on, the tensors themselves, not copies. Empty if it has none. Throws if the optimizer is not
/// derived from one of the eight, naming its type.
NamedValues named_state(const torch::optim::Optimizer& optimizer, const at::Tensor& parameter);

/// Gives it a copy, on the parameter's device and of its dtype and layout; "step" may be any number, or a tensor that
/// holds one, as Python has it. Empty: forgets the state. Throws on unknown names and other sizes, having changed
/// nothing.
void load_named_state(torch::optim::Optimizer& optimizer, const at::Tensor& parameter, const NamedValues& state);

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

NamedValues to_named(const StateShape& shape, const StateRef& state);
/// Checked, copied and laid out for the parameter. `who` starts messages.
SlotState from_named(const StateShape& shape, const NamedValues& state, const at::Tensor& parameter,
                     const std::string& who);

}  // namespace detail
}  // namespace lockstep::optim
