#include "lockstep/optim/adamax.h"

#include <ATen/ops/_foreach_abs.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_addcdiv.h>
#include <ATen/ops/_foreach_lerp.h>
#include <ATen/ops/_foreach_maximum.h>
#include <c10/core/GradMode.h>

#include <cmath>

namespace lockstep::optim {
namespace {

void update_lists(const detail::UpdateLists& lists, const AdamaxOptions& options) {
  const auto [beta1, beta2] = options.betas;
  const auto gradients = detail::loop_gradients(lists, options.maximize, options.weight_decay);
  const auto& averages = lists.slots[0];
  const auto& largest = lists.slots[1];
  at::_foreach_lerp_(averages, gradients, 1 - beta1);
  detail::scale(largest, beta2);
  const auto sizes = at::_foreach_abs(gradients);
  at::_foreach_add_(sizes, options.eps);
  at::_foreach_maximum_(largest, sizes);
  std::vector<at::Scalar> step_sizes;
  for (const auto step : lists.steps) {
    step_sizes.emplace_back(-(options.lr / (1 - std::pow(beta1, static_cast<double>(step)))));
  }
  at::_foreach_addcdiv_(lists.parameters, averages, largest, step_sizes);
}

}  // namespace

void AdamaxRule::check(const Options& options) {
  detail::check_not_negative(kName, "learning rate", options.lr);
  detail::check_not_negative(kName, "epsilon value", options.eps);
  detail::check_betas(kName, std::get<0>(options.betas), std::get<1>(options.betas));
  detail::check_not_negative(kName, "weight_decay value", options.weight_decay);
}

void AdamaxRule::update(ParameterUpdates updates, const Options& options) {
  check_gradients<AdamaxRule>(updates, options);
  const at::NoGradGuard no_grad;
  const detail::SlotsUsed used = {true, true};
  detail::fill_slots(updates, used);
  detail::advance(updates);
  for (const auto& lists : detail::lists_of(updates, used)) update_lists(lists, options);
}

}  // namespace lockstep::optim
