#include "lockstep/dtensor/fast_path.h"

#include <c10/util/SmallVector.h>

#include <utility>
#include <vector>

#include "lockstep/dtensor/dtensor_impl.h"

namespace lockstep::detail {
namespace {

/// Flags that the dispatcher would have to look at, and a DTensor does not show.
bool is_plain(const at::Tensor& local) {
  return !local.is_conj() && !local.is_neg() && !local._is_zerotensor();
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

}  // namespace

bool run_elementwise(OperatorCall& call) {
  const DTensorImpl* first = nullptr;
  bool takes_replicas = false;
  for (std::size_t i = 0; i < call.argument_count(); ++i) {
    const auto& value = call.argument(i);
    if (value.isList()) return false;
    if (!value.isTensor() || !value.toTensor().defined()) continue;
    const auto& tensor = value.toTensor();
    const auto* impl = dtensor_impl(tensor);
    if (impl == nullptr) {
      if (tensor.dim() != 0 || tensor.requires_grad()) return false;
      continue;
    }
    if (first == nullptr) first = impl;
    takes_replicas = takes_replicas || impl->takes_replicas();
    if (impl->layout() != first->layout() && !(*impl->layout() == *first->layout())) return false;
    if (!is_plain(impl->local()) || impl->is_copied()) return false;
  }
  if (first->layout()->has_partial() || !first->mesh().is_member()) return false;

  const auto& returns = call.schema().returns();
  if (returns.size() != 1) return false;
  const bool writes = is_written(returns[0]);
  const bool views = returns[0].alias_info() != nullptr && !writes;
  const bool keeps_strides = views || first->is_contiguous();
  const auto strides = keeps_strides || writes ? std::vector<int64_t>() : elementwise_strides(call, *first);
  c10::SmallVector<c10::IValue, 3> dtensors;  // keeps `first` too
  std::size_t written = 0;
  for (std::size_t i = 0; i < call.argument_count(); ++i) {
    auto& value = call.argument(i);
    const auto* impl = value.isTensor() ? dtensor_impl(value.toTensor()) : nullptr;
    if (impl == nullptr) continue;
    dtensors.push_back(std::exchange(value, c10::IValue(impl->local())));
    if (writes && is_written(call.schema().arguments()[i])) written = dtensors.size() - 1;
  }
  if (views) replay_views();
  call.proceed();
  auto& result = call.result(0);
  if (writes) {
    result = dtensors[written];
    return true;
  }
  auto local = std::move(result).toTensor();
  const auto of_result = keeps_strides ? first->strides() : at::IntArrayRef(strides);
  const bool has_counter = views && first->version_counter().enabled();
  auto wrapped = wrap_view(std::move(local), first->layout(), of_result, has_counter);
  if (takes_replicas) dtensor_impl(wrapped)->set_takes_replicas();
  result = std::move(wrapped);
  return true;
}

}  // namespace lockstep::detail
