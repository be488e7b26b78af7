#include "lockstep/ddp/per_parameter_reduction.h"

#include <c10/core/GradMode.h>

#include "lockstep/comm/collectives.h"

namespace lockstep::detail {

PerParameterReduction::PerParameterReduction(std::vector<at::Tensor> parameters, GroupPtr group,
                                             std::function<bool()> is_enabled)
    : parameters_(std::move(parameters)), group_(std::move(group)), is_enabled_(std::move(is_enabled)) {
  hooks_.add(parameters_, [this](std::size_t index) { on_gradient(index); });
}

void PerParameterReduction::on_gradient(std::size_t index) {
  const auto& parameter = parameters_[index];
  if (!is_enabled_() || !parameter.grad().defined()) return;
  const at::NoGradGuard no_grad;
  auto& gradient = parameter.mutable_grad();
  for (const auto& hook : user_hooks_) hook(gradient, parameter);
  if (!user_hooks_.empty()) return;
  const auto sum = gradient.div(group_->getSize());
  all_reduce(sum, group_);
  gradient.copy_(sum);
}

}  // namespace lockstep::detail
