// Records a forward pass as a Graph, without running it: operators see tensors that have sizes and no elements.
#pragma once

#include <torch/nn/module.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/graph/graph.h"

namespace lockstep::graph {

/// A tensor that enters a graph from outside, besides the program's inputs.
struct OuterTensor {
  std::string name;  // dotted
  at::Tensor tensor;
  bool is_parameter = true;
};

/// Parameters, then buffers, of a module, each once: tied ones have the name they are met by first.
std::vector<OuterTensor> outer_tensors(const torch::nn::Module& module);

struct CaptureOptions {
  /// A checkpoint() inside becomes one node (Region). Otherwise it is refused.
  bool keeps_regions = false;
};

/// What `forward` does with `inputs`. It is called once, with tensors that look like the inputs and show the device
/// `meta`, and returns the tensors it gives back; real parameters and buffers are neither read nor changed, and no
/// random number is drawn. Values of the graph: inputs, then `outer`, then constants.
///
/// Throws, naming the operator: for what depends on elements (item(), nonzero(), masks as indices), for autograd
/// functions of the program's own, whose backward a graph does not have, and for tensors that need gradients and are
/// neither inputs nor among `outer`.
Graph capture(const std::vector<at::Tensor>& inputs, const std::vector<OuterTensor>& outer,
              const std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& fakes)>& forward,
              const CaptureOptions& options = {});

/// Calls `function` on tensors without elements, also through operators that libtorch has no kernel of for them.
std::vector<at::Tensor> run_on_fakes(
    const std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& inputs)>& function,
    const std::vector<at::Tensor>& fakes);

/// Which of autocast's devices are on, and in which type.
using AutocastState = std::vector<std::pair<at::DeviceType, at::ScalarType>>;
AutocastState autocast_state();

}  // namespace lockstep::graph
