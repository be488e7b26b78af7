#include "lockstep/optim/rprop.h"

#include <ATen/ops/_foreach_addcmul.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_neg.h>
#include <ATen/ops/_foreach_sign.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

namespace lockstep::optim {
namespace {

void update_lists(const detail::UpdateLists& lists, const RpropOptions& options) {
  const auto [eta_minus, eta_plus] = options.etas;
  const auto [smallest, largest] = options.step_sizes;
  const auto& previous = lists.slots[0];
  const auto& step_sizes = lists.slots[1];
  const auto gradients = detail::loop_gradients(lists, options.maximize, /*weight_decay=*/0);

  const auto agreement = at::_foreach_mul(gradients, previous);
  at::_foreach_sign_(agreement);
  at::_foreach_copy_(previous, gradients);
  for (std::size_t i = 0; i < agreement.size(); ++i) {
    const auto& sign = agreement[i];
    const auto has_turned = sign.lt(0);
    // Having stepped too far, a parameter waits a step: without a gradient, now and as the next one's predecessor.
    previous[i].masked_fill_(has_turned, 0);
    const auto goes_on = sign.gt(0);
    const auto knows_nothing = sign.eq(0);
    sign.masked_fill_(goes_on, eta_plus).masked_fill_(has_turned, eta_minus).masked_fill_(knows_nothing, 1);
    step_sizes[i].mul_(sign).clamp_(smallest, largest);
  }
  at::_foreach_addcmul_(lists.parameters, at::_foreach_sign(previous), step_sizes, -1);
}

}  // namespace

void RpropRule::check(const Options& options) {
  const auto [eta_minus, eta_plus] = options.etas;
  detail::check_not_negative(kName, "learning rate", options.lr);
  TORCH_CHECK(eta_minus > 0 && eta_minus < 1 && eta_plus > 1, "[lockstep/optim] Rprop: Invalid eta values: ", eta_minus,
              ", ", eta_plus, ". They must be between 0 and 1, and above 1.");
}

void RpropRule::update(ParameterUpdates updates, const Options& options) {
  check_gradients<RpropRule>(updates, options);
  const at::NoGradGuard no_grad;
  for (const auto& update : updates) {
    detail::fill_slot(update.parameter, *update.state.slots[0]);
    detail::fill_slot(update.parameter, *update.state.slots[1], options.lr);
  }
  detail::advance(updates);
  for (const auto& lists : detail::lists_of(updates, {true, true})) update_lists(lists, options);
}

}  // namespace lockstep::optim
