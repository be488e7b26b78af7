#include "lockstep/optim/rmsprop.h"

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_addcdiv.h>
#include <ATen/ops/_foreach_addcmul.h>
#include <ATen/ops/_foreach_lerp.h>
#include <ATen/ops/_foreach_sqrt.h>
#include <c10/core/GradMode.h>

namespace lockstep::optim {
namespace {

constexpr std::size_t kSquare = 0;
constexpr std::size_t kMomentum = 1;
constexpr std::size_t kAverage = 2;

void update_lists(const detail::UpdateLists& lists, const RMSpropOptions& options) {
  const auto gradients = detail::loop_gradients(lists, options.maximize, options.weight_decay);
  const auto& squares = lists.slots[kSquare];
  detail::scale(squares, options.alpha);
  at::_foreach_addcmul_(squares, gradients, gradients, 1 - options.alpha);
  std::vector<at::Tensor> denominators;
  if (options.centered) {
    const auto& averages = lists.slots[kAverage];
    at::_foreach_lerp_(averages, gradients, 1 - options.alpha);
    denominators = at::_foreach_addcmul(squares, averages, averages, -1);
    at::_foreach_sqrt_(denominators);
  } else {
    denominators = at::_foreach_sqrt(squares);
  }
  at::_foreach_add_(denominators, options.eps);
  if (options.momentum > 0) {
    const auto& buffers = lists.slots[kMomentum];
    detail::scale(buffers, options.momentum);
    at::_foreach_addcdiv_(buffers, gradients, denominators);
    at::_foreach_add_(lists.parameters, buffers, -options.lr);
  } else {
    at::_foreach_addcdiv_(lists.parameters, gradients, denominators, -options.lr);
  }
}

}  // namespace

void RMSpropRule::check(const Options& options) {
  detail::check_not_negative(kName, "learning rate", options.lr);
  detail::check_not_negative(kName, "epsilon value", options.eps);
  detail::check_not_negative(kName, "momentum value", options.momentum);
  detail::check_not_negative(kName, "weight_decay value", options.weight_decay);
  detail::check_not_negative(kName, "alpha value", options.alpha);
}

void RMSpropRule::update(ParameterUpdates updates, const Options& options) {
  check_gradients<RMSpropRule>(updates, options);
  const at::NoGradGuard no_grad;
  const detail::SlotsUsed used = {true, options.momentum > 0, options.centered};
  detail::fill_slots(updates, used);
  detail::advance(updates);
  for (const auto& lists : detail::lists_of(updates, used)) update_lists(lists, options);
}

}  // namespace lockstep::optim
