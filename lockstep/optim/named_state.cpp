#include "lockstep/optim/named_state.h"

#include <ATen/ops/empty_like.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <c10/util/Type.h>

#include <algorithm>
#include <vector>

#include "lockstep/base/str.h"
#include "lockstep/optim/optimizers.h"
#include "lockstep/optim/param_state.h"
#include "lockstep/optim/rules.h"
#include "lockstep/state/state_kind.h"

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

/// Calls visit<Rule>() for the rule the optimizer follows.
template <class Visit, class... Rules>
void with_rule_of(const torch::optim::Optimizer& optimizer, RuleList<Rules...> /*rules*/, Visit visit) {
  const bool is_known = ((follows<Rules>(optimizer) && (visit.template operator()<Rules>(), true)) || ...);
  TORCH_CHECK(is_known, "[lockstep/optim] the state of ", c10::demangle(typeid(optimizer).name()),
              " has no known names: it is none of the optimizers of torch::optim and lockstep::optim that have");
}

constexpr const char* kStep = "step";

/// libtorch counts steps in integers, Python in tensors.
int64_t count_of(const c10::IValue& value, const std::string& who) {
  const bool is_one = value.isScalar() || (value.isTensor() && value.toTensor().numel() == 1);
  TORCH_CHECK(is_one, who, ": 'step' is not one number");
  return value.isTensor() ? value.toTensor().item().toLong() : value.toScalar().toLong();
}

}  // namespace

NamedValues named_state(const torch::optim::Optimizer& optimizer, const at::Tensor& parameter) {
  NamedValues named;
  with_rule_of(optimizer, AllRules(), [&]<class Rule>() {
    using ParamState = detail::ParamStateOf<Rule>;
    const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
    if (found == optimizer.state().end()) return;
    named = detail::to_named(detail::StateShape::of<Rule>(),
                             ParamState::ref(static_cast<typename ParamState::Type&>(*found->second)));
  });
  return named;
}

void load_named_state(torch::optim::Optimizer& optimizer, const at::Tensor& parameter, const NamedValues& state) {
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

NamedValues to_named(const StateShape& shape, const StateRef& state) {
  NamedValues named;
  for (std::size_t slot = 0; slot < kSlotCount; ++slot) {
    const auto* tensor = state.slots[slot];
    if (tensor != nullptr && tensor->defined()) named.emplace(shape.slots[slot], *tensor);
  }
  if (shape.counts_steps && !named.empty()) {
    named.emplace(kStep, *state.step);
  }
  return named;
}

SlotState from_named(const StateShape& shape, const NamedValues& state, const at::Tensor& parameter,
                     const std::string& who) {
  std::vector<std::string> names;
  if (shape.counts_steps) names.emplace_back(kStep);
  for (const auto* slot : shape.slots) {
    if (slot != nullptr) names.emplace_back(slot);
  }
  for (const auto& [name, value] : state) {
    if (lockstep::detail::is_unused(value)) continue;
    TORCH_CHECK(std::find(names.begin(), names.end(), name) != names.end(), who, " holds '", name,
                "'. This optimizer knows ", join(names, ", "));
    if (name == kStep) {
      count_of(value, who);
      continue;
    }
    TORCH_CHECK(value.isTensor(), who, ": '", name, "' is no tensor");
    TORCH_CHECK(value.toTensor().sizes() == parameter.sizes(), who, ": '", name, "' has sizes ",
                value.toTensor().sizes(), ", the parameter ", parameter.sizes());
  }
  TORCH_CHECK(!shape.counts_steps || state.empty() || state.contains(kStep), who, " holds no 'step'");

  const at::NoGradGuard no_grad;
  SlotState loaded;
  for (std::size_t slot = 0; slot < kSlotCount; ++slot) {
    if (shape.slots[slot] == nullptr) continue;
    const auto found = state.find(shape.slots[slot]);
    if (found == state.end() || lockstep::detail::is_unused(found->second)) continue;
    const auto& given = found->second.toTensor();
    loaded.slots[slot] =
        at::empty_like(parameter, {}, at::MemoryFormat::Preserve).copy_(given.is_sparse() ? given.to_dense() : given);
  }
  if (const auto step = state.find(kStep); step != state.end()) loaded.step = count_of(step->second, who);
  return loaded;
}

}  // namespace detail
}  // namespace lockstep::optim
