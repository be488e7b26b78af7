// A part through TorchScript's graph executor. Internal to graph.
#pragma once

#include "lockstep/graph/backends.h"

namespace lockstep::graph {

/// The part as a TorchScript graph. The executor profiles at first, operator by operator; it is warmed up here, on
/// zeros, so that the first run of the program is as the later ones are.
GraphFunction compile_by_executor(const Graph& part, const std::vector<at::Tensor>& examples);

}  // namespace lockstep::graph
