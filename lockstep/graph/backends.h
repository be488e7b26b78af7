// What turns a part of a graph into something that runs. A backend gets the part and examples of its inputs: fakes that
// have sizes and no elements, and real parameters; it returns a function of the part's inputs to its outputs.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "lockstep/graph/graph.h"

namespace lockstep::graph {

using GraphFunction = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& inputs)>;
using Backend = std::function<GraphFunction(const Graph& part, const std::vector<at::Tensor>& examples)>;

/// There are:
///   "eager"     calls the operators one after another, above autograd: the bits and the nodes of the program itself
///   "autograd"  the same as one node of autograd: gradients come when the whole part's backward has run. Once
///               differentiable; a part that writes in place to its inputs runs as "eager" does
///   "executor"  TorchScript's graph executor
/// and those that were registered. Throws for others, naming what there is.
Backend backend_named(const std::string& name);
void register_backend(const std::string& name, Backend backend);
std::vector<std::string> backend_names();

/// Runs all nodes in order, letting go of tensors that nobody needs any more.
std::vector<at::Tensor> run_graph(const Graph& graph, const std::vector<at::Tensor>& inputs);

}  // namespace lockstep::graph
