#include "lockstep/optim/functional.h"

#include <c10/util/Exception.h>

#include "lockstep/base/str.h"

namespace lockstep::optim {

FunctionalOptimizer::FunctionalOptimizer(std::vector<at::Tensor> parameters) : parameters_(std::move(parameters)) {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    TORCH_CHECK(parameters_[i].defined(), "[lockstep/optim] parameter ", i, " of ", parameters_.size(),
                " is undefined");
  }
}

void FunctionalOptimizer::check_count(const std::vector<at::Tensor>& gradients) const {
  TORCH_CHECK(gradients.size() == parameters_.size(), "[lockstep/optim] ", name(), ": step() was given ",
              gradients.size(), " gradients for ", parameters_.size(),
              " parameters. It takes one for each, undefined for those that shall stay.");
}

void FunctionalOptimizer::check_index(std::size_t index) const {
  TORCH_CHECK(index < parameters_.size(), "[lockstep/optim] ", name(), ": there is no parameter ", index, " of ",
              parameters_.size());
}

template <class Rule>
Functional<Rule>::Functional(std::vector<at::Tensor> parameters, Options options)
    : FunctionalOptimizer(std::move(parameters)), options_(options), states_(this->parameters().size()) {
  Rule::check(options);
  detail::check_listed_once(this->parameters(), Rule::kName);
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
NamedValues Functional<Rule>::state(std::size_t index) const {
  check_index(index);
  auto state = states_[index];
  return detail::to_named(detail::StateShape::of<Rule>(), state.ref());
}

template <class Rule>
void Functional<Rule>::load_state(std::size_t index, const NamedValues& state) {
  check_index(index);
  states_[index] = detail::from_named(detail::StateShape::of<Rule>(), state, parameters()[index],
                                      str("[lockstep/optim] ", Rule::kName, ": state of parameter ", index));
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
