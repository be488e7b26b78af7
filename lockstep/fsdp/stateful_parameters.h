// The parameters of an optimizer by the names they have in a module. Internal to fsdp and checkpoint.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "lockstep/fsdp/flat_pieces.h"
#include "lockstep/shard/layout.h"
#include "lockstep/state/optimizer_state.h"
#include "lockstep/state/sharded_state.h"

namespace lockstep::detail {

struct StatefulParameter {
  std::vector<std::string> names;  // in the module; several if it is tied
  at::Tensor tensor;
  std::shared_ptr<const Layout> layout;
  std::vector<FlatPiece> pieces;  // of a flat one

  const std::string& name() const { return names.front(); }
  std::vector<int64_t> sizes() const { return layout ? layout->sizes() : tensor.sizes().vec(); }
  /// Its names, or those of what a flat one consists of.
  std::vector<std::string> saved_names() const;
};

/// In the optimizer's order. Throws if the module does not have one of them.
std::vector<StatefulParameter> stateful_parameters(const torch::nn::Module& module,
                                                   const torch::optim::Optimizer& optimizer);

/// Gives each group of `dict` the options of the saved group that its parameters were in. Throws if they were in
/// several. `parameters` by the dictionary's numbering.
void take_group_options(OptimizerStateDict& dict, const std::vector<StatefulParameter>& parameters,
                        const std::vector<NamedOptimizerState::Group>& saved);

}  // namespace lockstep::detail
