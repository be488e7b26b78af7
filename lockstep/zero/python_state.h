// Optimizer state as Python writes and reads it. A file that torch.save(optimizer.state_dict(), path) wrote is
//   from_python(torch::pickle_load(bytes))
// and torch::pickle_save(to_python(dict)) are the bytes of one for optimizer.load_state_dict(torch.load(path)).
#pragma once

#include "lockstep/zero/state_dict.h"

namespace lockstep {

/// {"state": {index: {name: value}}, "param_groups": [{name: value, "params": [index]}]}. "step" becomes a float
/// tensor.
c10::IValue to_python(const OptimizerStateDict& dict);

/// The opposite. Values that are None are left out, and so is state that has nothing else. Throws, naming what is
/// missing, if `value` has another form.
OptimizerStateDict from_python(const c10::IValue& value);

}  // namespace lockstep
