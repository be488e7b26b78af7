#include "lockstep/optim/update.h"

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_neg.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/view_as_real.h>
#include <c10/util/Exception.h>
#include <c10/util/complex.h>

#include <algorithm>
#include <map>
#include <unordered_map>

namespace lockstep::optim::detail {
namespace {

bool is_laid_out_like(const at::Tensor& tensor, const at::Tensor& parameter) {
  return tensor.scalar_type() == parameter.scalar_type() && tensor.device() == parameter.device() &&
         tensor.sizes() == parameter.sizes() && tensor.strides() == parameter.strides();
}

/// The kernels walk all tensors of a parameter as plain memory, in step.
bool is_fusable(const ParameterUpdate& update, const SlotsUsed& used) {
  const auto& parameter = update.parameter;
  if (!parameter.is_cpu() && !parameter.is_cuda()) return false;
  if (!parameter.is_floating_point() || !parameter.is_non_overlapping_and_dense()) return false;
  for (std::size_t slot = 0; slot < kSlotCount; ++slot) {
    if (used[slot] && !is_laid_out_like(*update.state.slots[slot], parameter)) return false;
  }
  return is_laid_out_like(update.gradient, parameter);
}

at::Tensor as_real(const at::Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor.resolve_conj()) : tensor;
}

/// Elements below which libtorch's own loops use one thread.
constexpr int64_t kThreadGrain = 32768;

bool is_small(const at::Tensor& parameter) {
  return parameter.is_cpu() && parameter.numel() <= kThreadGrain;
}

bool holds(const UpdateLists& lists, const at::Tensor& parameter, bool fusable) {
  const auto& first = lists.parameters.front();
  return lists.is_fusable == fusable && lists.is_small == is_small(parameter) && first.device() == parameter.device() &&
         first.scalar_type() == parameter.scalar_type();
}

}  // namespace

std::vector<at::Tensor> UpdateLists::step_tensors() const {
  std::map<int64_t, at::Tensor> of_step;
  std::vector<at::Tensor> tensors;
  tensors.reserve(steps.size());
  for (const auto step : steps) {
    auto& tensor = of_step[step];
    if (!tensor.defined()) {
      tensor = at::full({}, static_cast<double>(step), parameters.front().options().dtype(at::kFloat));
    }
    tensors.push_back(tensor);
  }
  return tensors;
}

std::vector<UpdateLists> lists_of(ParameterUpdates updates, const SlotsUsed& used) {
  std::vector<UpdateLists> all;
  for (const auto& update : updates) {
    const bool fusable = is_fusable(update, used);
    const auto parameter = as_real(update.parameter);
    auto lists =
        std::find_if(all.begin(), all.end(), [&](const UpdateLists& each) { return holds(each, parameter, fusable); });
    if (lists == all.end()) {
      lists = all.insert(all.end(), UpdateLists{.is_fusable = fusable, .is_small = is_small(parameter)});
      lists->parameters.reserve(updates.size());
      lists->gradients.reserve(updates.size());
      for (std::size_t slot = 0; slot < kSlotCount; ++slot) {
        if (used[slot]) lists->slots[slot].reserve(updates.size());
      }
      lists->steps.reserve(updates.size());
    }
    lists->parameters.push_back(parameter);
    lists->gradients.push_back(as_real(update.gradient));
    for (std::size_t slot = 0; slot < kSlotCount; ++slot) {
      if (used[slot]) lists->slots[slot].push_back(as_real(*update.state.slots[slot]));
    }
    lists->steps.push_back(update.state.step != nullptr ? *update.state.step : 0);
  }
  return all;
}

std::vector<at::Tensor> loop_gradients(const UpdateLists& lists, bool maximize, double weight_decay) {
  if (!maximize) {
    return weight_decay == 0 ? lists.gradients : at::_foreach_add(lists.gradients, lists.parameters, weight_decay);
  }
  auto negated = at::_foreach_neg(lists.gradients);
  if (weight_decay != 0) at::_foreach_add_(negated, lists.parameters, weight_decay);
  return negated;
}

void scale(const std::vector<at::Tensor>& tensors, double factor) {
  if (!tensors.front().is_cpu()) return at::_foreach_mul_(tensors, factor);
  // There kernels round a factor that is a number to the tensors' type, and 0.999 is 1 in bfloat16. One that is a
  // tensor, as Python passes it, they do not.
  auto exact = at::scalar_tensor(factor, at::kDouble);
  exact.unsafeGetTensorImpl()->set_wrapped_number(true);
  for (const auto& tensor : tensors) tensor.mul_(exact);
}

void fill_slot(const at::Tensor& parameter, at::Tensor& slot, double value) {
  if (slot.defined()) return;
  // Complex numbers count as two real ones, in all rules.
  const c10::Scalar fill =
      parameter.is_complex() ? c10::Scalar(c10::complex<double>(value, value)) : c10::Scalar(value);
  slot = at::full_like(parameter, fill, {}, at::MemoryFormat::Preserve);
}

void fill_slots(ParameterUpdates updates, const SlotsUsed& used) {
  for (const auto& update : updates) {
    for (std::size_t slot = 0; slot < kSlotCount; ++slot) {
      if (used[slot]) fill_slot(update.parameter, *update.state.slots[slot]);
    }
  }
}

void advance(ParameterUpdates updates) {
  for (const auto& update : updates) ++*update.state.step;
}

void check_gradients(ParameterUpdates updates, const char* rule, bool takes_sparse) {
  for (std::size_t i = 0; i < updates.size(); ++i) {
    const auto& [parameter, gradient, state] = updates[i];
    const auto who = [&] { return c10::str("[lockstep/optim] ", rule, ": gradient ", i, " of ", updates.size()); };
    TORCH_CHECK(parameter.sizes() == gradient.sizes(), who(), " has sizes ", gradient.sizes(), ", its parameter ",
                parameter.sizes());
    TORCH_CHECK(parameter.device() == gradient.device(), who(), " is on ", gradient.device(), ", its parameter on ",
                parameter.device());
    TORCH_CHECK(takes_sparse || !gradient.is_sparse(), who(),
                " is sparse, which this rule does not support. SGD and Adagrad do, without weight_decay.");
  }
}

void check_listed_once(c10::ArrayRef<at::Tensor> parameters, const char* rule) {
  std::unordered_map<const void*, std::size_t> seen;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto [before, is_new] = seen.emplace(parameters[i].unsafeGetTensorImpl(), i);
    TORCH_CHECK(is_new || !parameters[i].defined(), "[lockstep/optim] ", rule, ": parameters ", before->second, " and ",
                i, " of all groups are the same tensor, which would be stepped twice. List it once.");
  }
}

void check_not_negative(const char* rule, const char* what, double value) {
  TORCH_CHECK(value >= 0, "[lockstep/optim] ", rule, ": Invalid ", what, ": ", value, ". It must be >= 0.");
}

void check_betas(const char* rule, double beta1, double beta2) {
  const auto check = [&](int index, double beta) {
    TORCH_CHECK(beta >= 0 && beta < 1, "[lockstep/optim] ", rule, ": Invalid beta parameter at index ", index, ": ",
                beta, ". It must be >= 0 and < 1.");
  };
  check(0, beta1);
  check(1, beta2);
}

}  // namespace lockstep::optim::detail
