// A function of tensors as one node of autograd, whose backward is what autograd recorded inside. Internal to graph.
#pragma once

#include "lockstep/graph/backends.h"

namespace lockstep::graph {

/// Calls `function` with inputs that have no history, so that its graph begins there, and hides that graph behind one
/// node: gradients of all inputs come together, when the inner backward has run. Without gradients it is called as it
/// is. A second derivative is refused.
GraphFunction as_one_node(GraphFunction function);

}  // namespace lockstep::graph
