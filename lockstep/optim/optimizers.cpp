#include "lockstep/optim/optimizers.h"

#include <c10/core/GradMode.h>

#include "lockstep/optim/archive.h"
#include "lockstep/optim/param_state.h"

namespace lockstep::optim {
namespace {

template <class Rule>
StateRef state_of(torch::optim::Optimizer& optimizer, const at::Tensor& parameter) {
  using ParamState = detail::ParamStateOf<Rule>;
  auto& state = optimizer.state()[parameter.unsafeGetTensorImpl()];
  if (!state) state = std::make_unique<typename ParamState::Type>();
  return ParamState::ref(static_cast<typename ParamState::Type&>(*state));
}

template <class Rule>
bool keeps_state(const typename Rule::Options& options) {
  if constexpr (requires { &Rule::keeps_state; }) return Rule::keeps_state(options);
  return true;
}

}  // namespace

template <class Rule>
RuleOptimizer<Rule>::RuleOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& param_groups, Options defaults)
    : Optimizer(std::vector<torch::optim::OptimizerParamGroup>(), group_options(defaults)) {
  Rule::check(defaults);
  for (const auto& group : param_groups) add_param_group(group);
}

template <class Rule>
RuleOptimizer<Rule>::RuleOptimizer(std::vector<at::Tensor> parameters, Options defaults)
    : RuleOptimizer(std::vector<torch::optim::OptimizerParamGroup>{{std::move(parameters)}}, std::move(defaults)) {}

template <class Rule>
void RuleOptimizer<Rule>::add_param_group(const torch::optim::OptimizerParamGroup& group) {
  const auto options = group.has_options() ? options_of(group) : options_from<Options>(*defaults_);
  Rule::check(options);
  auto all = std::vector<at::Tensor>();
  for (const auto& each : param_groups_) all.insert(all.end(), each.params().begin(), each.params().end());
  all.insert(all.end(), group.params().begin(), group.params().end());
  detail::check_listed_once(all, Rule::kName);
  Optimizer::add_param_group(torch::optim::OptimizerParamGroup(group.params()));
  param_groups_.back().set_options(group_options(options));
  if constexpr (requires { &Rule::make_state; }) {
    for (const auto& parameter : group.params()) {
      Rule::make_state(parameter, state_of<Rule>(*this, parameter), options);
    }
  }
}

template <class Rule>
auto RuleOptimizer<Rule>::options_of(const torch::optim::OptimizerParamGroup& group) const -> Options {
  return options_from<Options>(group.options(), options_from<Options>(*defaults_));
}

template <class Rule>
at::Tensor RuleOptimizer<Rule>::step(LossClosure closure) {
  at::Tensor loss;
  if (closure) {
    const at::AutoGradMode with_grad(true);
    loss = closure();
  }
  struct GroupUpdates {
    Options options;
    std::vector<ParameterUpdate> updates;
  };
  // All groups are checked before any is changed.
  std::vector<GroupUpdates> groups;
  for (const auto& group : param_groups()) {
    auto& [options, updates] = groups.emplace_back(GroupUpdates{options_of(group), {}});
    updates.reserve(group.params().size());
    for (const auto& parameter : group.params()) {
      if (const auto& gradient = parameter.grad(); gradient.defined()) updates.push_back({parameter, gradient, {}});
    }
    check_gradients<Rule>(updates, options);
  }
  for (auto& [options, updates] : groups) {
    if (keeps_state<Rule>(options)) {
      for (auto& update : updates) update.state = state_of<Rule>(*this, update.parameter);
    }
    Rule::update(updates, options);
  }
  return loss;
}

template <class Rule>
void RuleOptimizer<Rule>::save(torch::serialize::OutputArchive& archive) const {
  detail::save_optimizer(archive, *this);
}

template <class Rule>
void RuleOptimizer<Rule>::load(torch::serialize::InputArchive& archive) {
  detail::load_optimizer(
      archive, *this,
      {.options = [&](const auto& now) { return group_options(options_from(now, options_from<Options>(*defaults_))); },
       .state = [] { return std::make_unique<typename detail::ParamStateOf<Rule>::Type>(); }});
}

template class RuleOptimizer<AdadeltaRule>;
template class RuleOptimizer<AdagradRule>;
template class RuleOptimizer<AdamRule>;
template class RuleOptimizer<AdamaxRule>;
template class RuleOptimizer<AdamWRule>;
template class RuleOptimizer<RMSpropRule>;
template class RuleOptimizer<RpropRule>;
template class RuleOptimizer<SGDRule>;

}  // namespace lockstep::optim
