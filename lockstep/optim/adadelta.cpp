#include "lockstep/optim/adadelta.h"

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_addcmul.h>
#include <ATen/ops/_foreach_div.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_sqrt.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

namespace lockstep::optim {

void AdadeltaRule::check(const Options& options) {
  detail::check_not_negative(kName, "learning rate", options.lr);
  TORCH_CHECK(options.rho >= 0 && options.rho <= 1, "[lockstep/optim] Adadelta: Invalid rho value: ", options.rho,
              ". It must be from 0 to 1.");
  detail::check_not_negative(kName, "epsilon value", options.eps);
  detail::check_not_negative(kName, "weight_decay value", options.weight_decay);
}

void AdadeltaRule::update(ParameterUpdates updates, const Options& options) {
  check_gradients<AdadeltaRule>(updates, options);
  const at::NoGradGuard no_grad;
  const detail::SlotsUsed used = {true, true};
  detail::fill_slots(updates, used);
  detail::advance(updates);
  for (const auto& lists : detail::lists_of(updates, used)) {
    const auto gradients = detail::loop_gradients(lists, options.maximize, options.weight_decay);
    const auto& squares = lists.slots[0];
    const auto& deltas = lists.slots[1];
    detail::scale(squares, options.rho);
    at::_foreach_addcmul_(squares, gradients, gradients, 1 - options.rho);
    const auto denominators = at::_foreach_add(squares, options.eps);
    at::_foreach_sqrt_(denominators);

    const auto changes = at::_foreach_add(deltas, options.eps);
    at::_foreach_sqrt_(changes);
    at::_foreach_div_(changes, denominators);
    at::_foreach_mul_(changes, gradients);
    detail::scale(deltas, options.rho);
    at::_foreach_addcmul_(deltas, changes, changes, 1 - options.rho);
    at::_foreach_add_(lists.parameters, changes, -options.lr);
  }
}

}  // namespace lockstep::optim
