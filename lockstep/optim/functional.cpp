#include "lockstep/optim/functional.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "lockstep/base/str.h"

namespace lockstep::optim {
namespace {

/// The slots' names and, if the rule counts them, "step".
template <class Rule>
std::vector<std::string> state_names() {
  std::vector<std::string> names;
  if (Rule::kCountsSteps) names.emplace_back("step");
  for (const auto* slot : Rule::kSlots) {
    if (slot != nullptr) names.emplace_back(slot);
  }
  return names;
}

}  // namespace

FunctionalOptimizer::FunctionalOptimizer(std::vector<at::Tensor> parameters) : parameters_(std::move(parameters)) {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    TORCH_CHECK(parameters_[i].defined(), "[lockstep/optim] parameter ", i, " of ", parameters_.size(),
                " is undefined");
  }
}

void FunctionalOptimizer::check_count(const std::vector<at::Tensor>& gradients) const {
  TORCH_CHECK_VALUE(gradients.size() == parameters_.size(), "[lockstep/optim] ", name(), ": step() was given ",
                    gradients.size(), " gradients for ", parameters_.size(),
                    " parameters. It takes one for each, undefined for those that shall stay.");
}

void FunctionalOptimizer::check_index(std::size_t index) const {
  TORCH_CHECK_INDEX(index < parameters_.size(), "[lockstep/optim] ", name(), ": there is no parameter ", index, " of ",
                    parameters_.size());
}

template <class Rule>
Functional<Rule>::Functional(std::vector<at::Tensor> parameters, Options options)
    : FunctionalOptimizer(std::move(parameters)), options_(options), states_(this->parameters().size()) {
  Rule::check(options);
}

template <class Rule>
void Functional<Rule>::step(const std::vector<at::Tensor>& gradients) {
  check_count(gradients);
  std::vector<ParameterUpdate> updates;
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    if (gradients[i].defined()) updates.push_back({parameters()[i], gradients[i], states_[i].ref()});
  }
  Rule::update(updates, options_);
}

template <class Rule>
void Functional<Rule>::set_options(const torch::optim::OptimizerOptions& options) {
  static_cast<Options&>(options_) = options_from<Options>(options, options_);
}

template <class Rule>
NamedState Functional<Rule>::state(std::size_t index) const {
  check_index(index);
  const auto& from = states_[index];
  NamedState state;
  for (std::size_t slot = 0; slot < kSlotCount; ++slot) {
    if (from.slots[slot].defined()) state.emplace(Rule::kSlots[slot], from.slots[slot]);
  }
  if (Rule::kCountsSteps && !state.empty()) {
    state.emplace("step", at::scalar_tensor(static_cast<double>(from.step), at::kFloat));
  }
  return state;
}

template <class Rule>
void Functional<Rule>::load_state(std::size_t index, const NamedState& state) {
  check_index(index);
  const at::NoGradGuard no_grad;
  const auto& parameter = parameters()[index];
  const auto who = [&] { return str("[lockstep/optim] ", Rule::kName, ": state of parameter ", index); };
  const auto names = state_names<Rule>();
  for (const auto& [name, tensor] : state) {
    TORCH_CHECK_VALUE(std::find(names.begin(), names.end(), name) != names.end(), who(), " holds '", name,
                      "'. This optimizer knows ", join(names, ", "));
    TORCH_CHECK_VALUE(name == "step" ? tensor.numel() == 1 : tensor.sizes() == parameter.sizes(), who(), ": '", name,
                      "' has sizes ", tensor.sizes(), ", the parameter ", parameter.sizes());
  }
  TORCH_CHECK_VALUE(!Rule::kCountsSteps || state.empty() || state.count("step") == 1, who(), " holds no 'step'");

  SlotState loaded;
  for (std::size_t slot = 0; slot < kSlotCount; ++slot) {
    if (Rule::kSlots[slot] == nullptr) continue;
    const auto found = state.find(Rule::kSlots[slot]);
    if (found == state.end()) continue;
    loaded.slots[slot] = at::empty_like(parameter, {}, at::MemoryFormat::Preserve).copy_(found->second);
  }
  if (const auto step = state.find("step"); step != state.end()) loaded.step = step->second.item().toLong();
  states_[index] = std::move(loaded);
}

template class Functional<AdadeltaRule>;
template class Functional<AdagradRule>;
template class Functional<AdamRule>;
template class Functional<AdamaxRule>;
template class Functional<AdamWRule>;
template class Functional<RMSpropRule>;
template class Functional<RpropRule>;
template class Functional<SGDRule>;

}  // namespace lockstep::optim
