// Optimizer state as Python writes and reads it:
//
//   load_python_state(path)         what torch.save(optimizer.state_dict(), path) wrote
//   save_python_state(path, dict)   for optimizer.load_state_dict(torch.load(path))
#pragma once

#include <string>
#include <vector>

#include "lockstep/state/optimizer_state.h"

namespace lockstep {

/// {"state": {index: {name: value}}, "param_groups": [{name: value, "params": [index]}]}. "step" becomes a float
/// tensor.
c10::IValue to_python(const OptimizerStateDict& dict);

/// The opposite. Values that are None are left out, and so is state that has nothing else. Throws, naming what is
/// missing, if `value` has another form.
OptimizerStateDict from_python(const c10::IValue& value);

/// Throw, naming the file, if it cannot be written or read.
void save_python_state(const std::string& path, const OptimizerStateDict& dict);
OptimizerStateDict load_python_state(const std::string& path);

/// The bytes of a file that torch.load() opens, also with weights_only=True, its default: libtorch's pickle_save() adds
/// notes on types that Python then refuses. Lists in the value must be generic ones.
std::vector<char> torch_save_bytes(const c10::IValue& value);

}  // namespace lockstep
