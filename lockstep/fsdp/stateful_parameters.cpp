#include "lockstep/fsdp/stateful_parameters.h"

#include <c10/util/Exception.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <unordered_map>

#include "lockstep/shard/layout_of.h"

namespace lockstep::detail {

std::vector<std::string> StatefulParameter::saved_names() const {
  if (pieces.empty()) return names;
  std::vector<std::string> of_pieces;
  for (const auto& piece : pieces) of_pieces.push_back(piece.name);
  return of_pieces;
}

std::vector<StatefulParameter> stateful_parameters(const torch::nn::Module& module,
                                                   const torch::optim::Optimizer& optimizer) {
  std::unordered_map<const void*, std::vector<std::string>> names;
  for (const auto& item : module.named_parameters()) {
    names[item.value().unsafeGetTensorImpl()].push_back(item.key());
  }
  const auto flat = flat_pieces(module);
  std::vector<StatefulParameter> parameters;
  for (const auto& tensor : optimized_parameters(optimizer)) {
    const auto found = names.find(tensor.unsafeGetTensorImpl());
    TORCH_CHECK(
        found != names.end(), "[lockstep/fsdp] parameter ", parameters.size(),
        " of the optimizer is none of the module's, and has no name. Make the optimizer after fully_shard(), of "
        "the module's parameters().");
    const auto pieces = flat.find(tensor.unsafeGetTensorImpl());
    parameters.push_back(
        {found->second, tensor, layout_of(tensor), pieces == flat.end() ? std::vector<FlatPiece>() : pieces->second});
  }
  return parameters;
}

void take_group_options(OptimizerStateDict& dict, const std::vector<StatefulParameter>& parameters,
                        const std::vector<NamedOptimizerState::Group>& saved) {
  for (std::size_t i = 0; i < dict.param_groups.size(); ++i) {
    auto& into = dict.param_groups[i];
    const NamedOptimizerState::Group* from = nullptr;
    for (const auto index : into.params) {
      const auto& parameter = parameters[static_cast<std::size_t>(index)];
      // What a flat parameter consists of may have been in several groups.
      std::vector<std::vector<std::string>> alternatives = {parameter.names};
      for (const auto& piece : parameter.pieces) alternatives.push_back({piece.name});
      for (const auto& names : alternatives) {
        const auto found = std::find_if(saved.begin(), saved.end(), [&](const auto& group) {
          return std::any_of(names.begin(), names.end(), [&](const auto& name) {
            return std::find(group.params.begin(), group.params.end(), name) != group.params.end();
          });
        });
        if (found == saved.end()) continue;
        TORCH_CHECK(from == nullptr || from == &*found, "[lockstep/fsdp] group ", i, " of the optimizer holds '",
                    names.front(), "', which was saved in another group than '", from->params.front(),
                    "', with other options. Make the groups as they were saved.");
        from = &*found;
      }
    }
    if (from != nullptr) into.options = from->options;
  }
}

}  // namespace lockstep::detail
