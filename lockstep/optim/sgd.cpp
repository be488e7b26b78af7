#include "lockstep/optim/sgd.h"

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include "lockstep/optim/one_thread.h"

namespace lockstep::optim {
namespace {

using detail::UpdateLists;

/// The CPU kernel leaves most elements of half types as they are (pytorch issue 191763).
bool has_fused_kernel(const UpdateLists& lists) {
  const auto& parameter = lists.parameters.front();
  return lists.is_fusable && !(parameter.is_cpu() && c10::isReducedFloatingType(parameter.scalar_type()));
}

void update_fused(const UpdateLists& lists, const SGDOptions& options, bool is_first_step) {
  const detail::OneThread one_thread(lists.is_small);
  at::_fused_sgd_(lists.parameters, lists.gradients, lists.slots[0], options.weight_decay, options.momentum, options.lr,
                  options.dampening, options.nesterov, options.maximize, is_first_step);
}

void update_by_loop(const UpdateLists& lists, const SGDOptions& options, bool is_first_step) {
  auto gradients = detail::loop_gradients(lists, options.maximize, options.weight_decay);
  if (options.momentum != 0) {
    const auto& buffers = lists.slots[0];
    if (is_first_step) {
      for (std::size_t i = 0; i < buffers.size(); ++i) buffers[i].copy_(gradients[i]);
    } else {
      detail::scale(buffers, options.momentum);
      at::_foreach_add_(buffers, gradients, 1 - options.dampening);
    }
    gradients = options.nesterov ? at::_foreach_add(gradients, buffers, options.momentum) : buffers;
  }
  at::_foreach_add_(lists.parameters, gradients, -options.lr);
}

void update_sparse(const ParameterUpdate& update, const SGDOptions& options) {
  auto gradient = options.maximize ? update.gradient.neg() : update.gradient;
  if (options.momentum != 0) {
    auto& buffer = *update.state.slots[0];
    if (buffer.defined()) {
      buffer.mul_(options.momentum).add_(gradient, 1 - options.dampening);
    } else {
      buffer = gradient.clone();
    }
    // Momentum that was loaded is dense, to which alone a sparse tensor can be added.
    const auto ahead = [&] {
      return buffer.is_sparse() ? gradient.add(buffer, options.momentum) : buffer.mul(options.momentum).add_(gradient);
    };
    gradient = options.nesterov ? ahead() : buffer;
  }
  update.parameter.add_(gradient, -options.lr);
}

void update_dense(ParameterUpdates updates, const SGDOptions& options, bool is_first_step) {
  for (const auto& lists : detail::lists_of(updates, {options.momentum != 0})) {
    has_fused_kernel(lists) ? update_fused(lists, options, is_first_step)
                            : update_by_loop(lists, options, is_first_step);
  }
}

}  // namespace

void SGDRule::check(const Options& options) {
  detail::check_not_negative(kName, "learning rate", options.lr);
  detail::check_not_negative(kName, "momentum value", options.momentum);
  detail::check_not_negative(kName, "weight_decay value", options.weight_decay);
  TORCH_CHECK(!options.nesterov || (options.momentum > 0 && options.dampening == 0),
              "[lockstep/optim] SGD: Nesterov momentum requires a momentum and zero dampening, not ", options.momentum,
              " and ", options.dampening);
}

void SGDRule::update(ParameterUpdates updates, const Options& options) {
  check_gradients<SGDRule>(updates, options);
  const at::NoGradGuard no_grad;
  // Kernels are told of a whole list whether it has momentum.
  std::vector<ParameterUpdate> first;
  std::vector<ParameterUpdate> later;
  for (const auto& update : updates) {
    if (update.gradient.is_sparse()) {
      update_sparse(update, options);
    } else if (options.momentum == 0 || update.state.slots[0]->defined()) {
      later.push_back(update);
    } else {
      *update.state.slots[0] = at::empty_like(update.parameter, {}, at::MemoryFormat::Preserve);
      first.push_back(update);
    }
  }
  update_dense(first, options, /*is_first_step=*/true);
  update_dense(later, options, /*is_first_step=*/false);
}

}  // namespace lockstep::optim
