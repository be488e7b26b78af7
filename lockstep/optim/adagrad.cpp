#include "lockstep/optim/adagrad.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_addcdiv.h>
#include <ATen/ops/_foreach_addcmul.h>
#include <ATen/ops/_foreach_sqrt.h>
#include <ATen/ops/_fused_adagrad.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <c10/core/GradMode.h>

#include "lockstep/optim/one_thread.h"

namespace lockstep::optim {
namespace {

using detail::UpdateLists;

double step_size(const AdagradOptions& options, int64_t step) {
  return options.lr / (1 + static_cast<double>(step - 1) * options.lr_decay);
}

/// On CUDA it is younger than the others: libtorch 2.11 has none.
bool has_fused_kernel(const UpdateLists& lists) {
  static const bool is_on_cuda = [] {
    const auto op = c10::Dispatcher::singleton().findSchema({"aten::_fused_adagrad_", ""});
    return op && op->hasKernelForDispatchKey(c10::DispatchKey::CUDA);
  }();
  return lists.is_fusable && (lists.parameters.front().is_cpu() || is_on_cuda);
}

void update_fused(const UpdateLists& lists, const AdagradOptions& options) {
  const detail::OneThread one_thread(lists.is_small);
  at::_fused_adagrad_(lists.parameters, lists.gradients, lists.slots[0], lists.step_tensors(), options.lr,
                      options.lr_decay, options.weight_decay, options.eps, options.maximize);
}

void update_by_loop(const UpdateLists& lists, const AdagradOptions& options) {
  const auto gradients = detail::loop_gradients(lists, options.maximize, options.weight_decay);
  const auto& sums = lists.slots[0];
  at::_foreach_addcmul_(sums, gradients, gradients, 1);
  const auto denominators = at::_foreach_sqrt(sums);
  at::_foreach_add_(denominators, options.eps);
  std::vector<at::Scalar> factors;
  for (const auto step : lists.steps) factors.emplace_back(-step_size(options, step));
  at::_foreach_addcdiv_(lists.parameters, gradients, denominators, factors);
}

/// Touches only the rows the gradient has.
void update_sparse(const ParameterUpdate& update, const AdagradOptions& options) {
  // The square of a sum is not the sum of squares: an index must occur once.
  const auto gradient = update.gradient.coalesce();
  const auto values = options.maximize ? gradient.values().neg() : gradient.values();
  const auto sparse = [&](const at::Tensor& of_values) {
    return at::sparse_coo_tensor(gradient.indices(), of_values, gradient.sizes())._coalesced_(true);
  };
  auto& sum = *update.state.slots[0];
  sum.add_(sparse(values.pow(2)));
  const auto denominators = sum.sparse_mask(gradient).values().sqrt().add_(options.eps);
  update.parameter.add_(sparse(values.div(denominators)), -step_size(options, *update.state.step));
}

}  // namespace

void AdagradRule::check(const Options& options) {
  detail::check_not_negative(kName, "learning rate", options.lr);
  detail::check_not_negative(kName, "lr_decay value", options.lr_decay);
  detail::check_not_negative(kName, "weight_decay value", options.weight_decay);
  detail::check_not_negative(kName, "initial_accumulator_value value", options.initial_accumulator_value);
  detail::check_not_negative(kName, "epsilon value", options.eps);
}

void AdagradRule::make_state(const at::Tensor& parameter, const StateRef& state, const Options& options) {
  detail::fill_slot(parameter, *state.slots[0], options.initial_accumulator_value);
}

void AdagradRule::update(ParameterUpdates updates, const Options& options) {
  check_gradients<AdagradRule>(updates, options);
  const at::NoGradGuard no_grad;
  for (const auto& update : updates) make_state(update.parameter, update.state, options);
  detail::advance(updates);
  std::vector<ParameterUpdate> dense;
  for (const auto& update : updates) {
    if (update.gradient.is_sparse()) {
      update_sparse(update, options);
    } else {
      dense.push_back(update);
    }
  }
  for (const auto& lists : detail::lists_of(dense, {true})) {
    has_fused_kernel(lists) ? update_fused(lists, options) : update_by_loop(lists, options);
  }
}

}  // namespace lockstep::optim
