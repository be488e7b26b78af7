#include "lockstep/optim/named_state.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <c10/util/Type.h>

#include <algorithm>
#include <vector>

#include "lockstep/base/str.h"
#include "lockstep/optim/optimizers.h"
#include "lockstep/optim/param_state.h"

namespace lockstep::optim {
namespace {

/// Those that libtorch has no class for.
struct NoClass {};
template <class Rule>
struct LibtorchClass {
  using Type = NoClass;
};
template <>
struct LibtorchClass<AdagradRule> {
  using Type = torch::optim::Adagrad;
};
template <>
struct LibtorchClass<AdamRule> {
  using Type = torch::optim::Adam;
};
template <>
struct LibtorchClass<AdamWRule> {
  using Type = torch::optim::AdamW;
};
template <>
struct LibtorchClass<RMSpropRule> {
  using Type = torch::optim::RMSprop;
};
template <>
struct LibtorchClass<SGDRule> {
  using Type = torch::optim::SGD;
};

template <class Rule>
bool follows(const torch::optim::Optimizer& optimizer) {
  using Theirs = typename LibtorchClass<Rule>::Type;
  if constexpr (!std::is_same_v<Theirs, NoClass>) {
    if (dynamic_cast<const Theirs*>(&optimizer) != nullptr) return true;
  }
  return dynamic_cast<const RuleOptimizer<Rule>*>(&optimizer) != nullptr;
}

template <class... Rules>
struct RuleList {};
using AllRules = RuleList<AdadeltaRule, AdagradRule, AdamRule, AdamaxRule, AdamWRule, RMSpropRule, RpropRule, SGDRule>;

/// Calls visit<Rule>() for the rule the optimizer follows.
template <class Visit, class... Rules>
void with_rule_of(const torch::optim::Optimizer& optimizer, RuleList<Rules...> /*rules*/, Visit visit) {
  const bool is_known = ((follows<Rules>(optimizer) && (visit.template operator()<Rules>(), true)) || ...);
  TORCH_CHECK_VALUE(is_known, "[lockstep/optim] the state of ", c10::demangle(typeid(optimizer).name()),
                    " has no known names: it is none of the optimizers of torch::optim and lockstep::optim that have");
}

}  // namespace

NamedState named_state(const torch::optim::Optimizer& optimizer, const at::Tensor& parameter) {
  NamedState named;
  with_rule_of(optimizer, AllRules(), [&]<class Rule>() {
    using ParamState = detail::ParamStateOf<Rule>;
    const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
    if (found == optimizer.state().end()) return;
    named = detail::to_named(detail::StateShape::of<Rule>(),
                             ParamState::ref(static_cast<typename ParamState::Type&>(*found->second)));
  });
  return named;
}

void load_named_state(torch::optim::Optimizer& optimizer, const at::Tensor& parameter, const NamedState& state) {
  with_rule_of(optimizer, AllRules(), [&]<class Rule>() {
    using ParamState = detail::ParamStateOf<Rule>;
    auto* key = parameter.unsafeGetTensorImpl();
    auto loaded = detail::from_named(detail::StateShape::of<Rule>(), state, parameter,
                                     str("[lockstep/optim] ", Rule::kName, ": state"));
    if (state.empty()) {
      optimizer.state().erase(key);
      return;
    }
    auto into = std::make_unique<typename ParamState::Type>();
    const auto ref = ParamState::ref(*into);
    if (ref.step != nullptr) *ref.step = loaded.step;
    for (std::size_t slot = 0; slot < kSlotCount; ++slot) {
      if (ref.slots[slot] != nullptr) *ref.slots[slot] = std::move(loaded.slots[slot]);
    }
    optimizer.state()[key] = std::move(into);
  });
}

namespace detail {

NamedState to_named(const StateShape& shape, const StateRef& state) {
  NamedState named;
  for (std::size_t slot = 0; slot < kSlotCount; ++slot) {
    const auto* tensor = state.slots[slot];
    if (tensor != nullptr && tensor->defined()) named.emplace(shape.slots[slot], *tensor);
  }
  if (shape.counts_steps && !named.empty()) {
    named.emplace("step", at::scalar_tensor(static_cast<double>(*state.step), at::kFloat));
  }
  return named;
}

SlotState from_named(const StateShape& shape, const NamedState& state, const at::Tensor& parameter,
                     const std::string& who) {
  std::vector<std::string> names;
  if (shape.counts_steps) names.emplace_back("step");
  for (const auto* slot : shape.slots) {
    if (slot != nullptr) names.emplace_back(slot);
  }
  for (const auto& [name, tensor] : state) {
    TORCH_CHECK_VALUE(std::find(names.begin(), names.end(), name) != names.end(), who, " holds '", name,
                      "'. This optimizer knows ", join(names, ", "));
    TORCH_CHECK_VALUE(name == "step" ? tensor.numel() == 1 : tensor.sizes() == parameter.sizes(), who, ": '", name,
                      "' has sizes ", tensor.sizes(), ", the parameter ", parameter.sizes());
  }
  TORCH_CHECK_VALUE(!shape.counts_steps || state.empty() || state.count("step") == 1, who, " holds no 'step'");

  const at::NoGradGuard no_grad;
  SlotState loaded;
  for (std::size_t slot = 0; slot < kSlotCount; ++slot) {
    if (shape.slots[slot] == nullptr) continue;
    const auto found = state.find(shape.slots[slot]);
    if (found == state.end()) continue;
    loaded.slots[slot] = at::empty_like(parameter, {}, at::MemoryFormat::Preserve).copy_(found->second);
  }
  if (const auto step = state.find("step"); step != state.end()) loaded.step = step->second.item().toLong();
  return loaded;
}

}  // namespace detail
}  // namespace lockstep::optim
