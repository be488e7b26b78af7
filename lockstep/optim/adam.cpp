#include "lockstep/optim/adam.h"

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_addcdiv.h>
#include <ATen/ops/_foreach_addcmul.h>
#include <ATen/ops/_foreach_div.h>
#include <ATen/ops/_foreach_lerp.h>
#include <ATen/ops/_foreach_maximum.h>
#include <ATen/ops/_foreach_sqrt.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <c10/core/GradMode.h>

#include <cmath>

#include "lockstep/optim/one_thread.h"

namespace lockstep::optim {
namespace {

using detail::UpdateLists;

void check_values(const char* rule, const auto& options) {
  detail::check_not_negative(rule, "learning rate", options.lr);
  detail::check_not_negative(rule, "epsilon value", options.eps);
  detail::check_betas(rule, std::get<0>(options.betas), std::get<1>(options.betas));
  detail::check_not_negative(rule, "weight_decay value", options.weight_decay);
}

void update_fused(const UpdateLists& lists, const AdamOptions& options) {
  const detail::OneThread one_thread(lists.is_small);
  const auto kernel = [&](auto call) {
    call(lists.parameters, lists.gradients, lists.slots[0], lists.slots[1], lists.slots[2], lists.step_tensors(),
         options.lr, std::get<0>(options.betas), std::get<1>(options.betas), options.weight_decay, options.eps,
         options.amsgrad, options.maximize);
  };
  if (options.decoupled_weight_decay) {
    kernel([](auto&&... arguments) { at::_fused_adamw_(arguments...); });
  } else {
    kernel([](auto&&... arguments) { at::_fused_adam_(arguments...); });
  }
}

void update_by_loop(const UpdateLists& lists, const AdamOptions& options) {
  const auto [beta1, beta2] = options.betas;
  const auto& averages = lists.slots[0];
  const auto& squares = lists.slots[1];
  const auto gradients =
      detail::loop_gradients(lists, options.maximize, options.decoupled_weight_decay ? 0 : options.weight_decay);
  if (options.decoupled_weight_decay && options.weight_decay != 0) {
    detail::scale(lists.parameters, 1 - options.lr * options.weight_decay);
  }
  at::_foreach_lerp_(averages, gradients, 1 - beta1);
  detail::scale(squares, beta2);
  at::_foreach_addcmul_(squares, gradients, gradients, 1 - beta2);

  if (options.amsgrad) at::_foreach_maximum_(lists.slots[2], squares);
  const auto denominators = at::_foreach_sqrt(options.amsgrad ? lists.slots[2] : squares);
  std::vector<at::Scalar> step_sizes;
  std::vector<at::Scalar> corrections;
  for (const auto step : lists.steps) {
    const auto exponent = static_cast<double>(step);
    step_sizes.emplace_back(-(options.lr / (1 - std::pow(beta1, exponent))));
    corrections.emplace_back(std::sqrt(1 - std::pow(beta2, exponent)));
  }
  at::_foreach_div_(denominators, corrections);
  at::_foreach_add_(denominators, options.eps);
  at::_foreach_addcdiv_(lists.parameters, averages, denominators, step_sizes);
}

void update_all(ParameterUpdates updates, const AdamOptions& options) {
  const at::NoGradGuard no_grad;
  const detail::SlotsUsed used = {true, true, options.amsgrad};
  detail::fill_slots(updates, used);
  detail::advance(updates);
  for (const auto& lists : detail::lists_of(updates, used)) {
    lists.is_fusable ? update_fused(lists, options) : update_by_loop(lists, options);
  }
}

}  // namespace

void AdamRule::check(const Options& options) {
  check_values(kName, options);
}

void AdamRule::update(ParameterUpdates updates, const Options& options) {
  check_gradients<AdamRule>(updates, options);
  update_all(updates, options);
}

void AdamWRule::check(const Options& options) {
  check_values(kName, options);
}

void AdamWRule::update(ParameterUpdates updates, const Options& options) {
  check_gradients<AdamWRule>(updates, options);
  update_all(updates, {.lr = options.lr,
                       .betas = options.betas,
                       .eps = options.eps,
                       .weight_decay = options.weight_decay,
                       .amsgrad = options.amsgrad,
                       .maximize = options.maximize,
                       .decoupled_weight_decay = true});
}

}  // namespace lockstep::optim
