#include "lockstep/zero/master_weights.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/where.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <unordered_map>

#include "lockstep/shard/flat.h"
#include "lockstep/state/piece.h"

namespace lockstep::detail {
namespace {

// In elements: what is compared at a time, so that comparing takes no memory worth naming.
constexpr int64_t kCompared = 1 << 20;

/// The master where the parameter is what it rounds to, else the parameter.
void follow(const at::Tensor& master, const at::Tensor& parameter) {
  const auto rounded = master.to(parameter.scalar_type());
  // Elsewhere the host would wait for the device to answer.
  if (parameter.is_cpu() && rounded.equal(parameter)) return;
  master.copy_(at::where(rounded.eq(parameter), master, parameter.to(master.scalar_type())));
}

}  // namespace

bool has_master(at::ScalarType dtype, const std::optional<at::ScalarType>& master_dtype) {
  return master_dtype && c10::isFloatingType(dtype) && c10::elementSize(dtype) < c10::elementSize(*master_dtype);
}

at::Tensor MasterWeights::made_master(const at::Tensor& parameter) const {
  if (!has_master(parameter.scalar_type(), dtype_)) return {};
  const at::NoGradGuard no_grad;
  const auto values = parameter.detach();
  return at::empty_like(values, values.options().dtype(dtype_)).copy_(values).requires_grad_();
}

std::vector<std::vector<at::Tensor>> MasterWeights::stepped_in_place_of(
    const std::vector<std::vector<at::Tensor>>& parameters) {
  std::unordered_map<const void*, at::Tensor> before;
  for (const auto& [parameter, master] : all_) before.emplace(parameter.unsafeGetTensorImpl(), master);
  std::vector<Stepped> all;
  std::vector<std::vector<at::Tensor>> groups;
  for (const auto& group : parameters) {
    auto& stepped = groups.emplace_back();
    for (const auto& parameter : group) {
      const auto found = before.find(parameter.unsafeGetTensorImpl());
      all.push_back({parameter, found != before.end() ? found->second : made_master(parameter)});
      stepped.push_back(all.back().master.defined() ? all.back().master : parameter);
    }
  }
  all_ = std::move(all);
  return groups;
}

void MasterWeights::follow_parameters() {
  const at::NoGradGuard no_grad;
  for (const auto& [parameter, master] : all_) {
    if (!master.defined() || parameter.numel() == 0) continue;
    const auto row = row_of(parameter);
    if (!row.defined() || parameter.strides() != master.strides()) {
      follow(master.detach(), parameter.detach());
      continue;
    }
    const auto master_row = row_of(master);
    for (int64_t begin = 0; begin < row.numel(); begin += kCompared) {
      const auto length = std::min(kCompared, row.numel() - begin);
      follow(master_row.narrow(0, begin, length), row.narrow(0, begin, length));
    }
  }
}

void MasterWeights::take_gradients() {
  const at::NoGradGuard no_grad;
  for (auto& [parameter, master] : all_) {
    if (!master.defined()) continue;
    const auto& gradient = parameter.grad();
    master.mutable_grad() = gradient.defined() ? gradient.to(master.scalar_type()) : at::Tensor();
  }
}

void MasterWeights::write_back() {
  const at::NoGradGuard no_grad;
  for (auto& [parameter, master] : all_) {
    if (!master.defined()) continue;
    parameter.detach().copy_(master);
    master.mutable_grad().reset();
  }
}

void MasterWeights::add_to(OptimizerStateDict& state) const {
  for (std::size_t i = 0; i < all_.size(); ++i) {
    if (all_[i].master.defined()) state.state[static_cast<int64_t>(i)].emplace(kMasterName, all_[i].master.detach());
  }
}

MasterWeights::ByPosition MasterWeights::taken_from(OptimizerStateDict& state) const {
  ByPosition masters;
  for (auto each = state.state.begin(); each != state.state.end();) {
    auto& [position, values] = *each;
    if (const auto found = values.find(kMasterName); found != values.end()) {
      const auto& [parameter, master] = all_.at(position);
      TORCH_CHECK(master.defined(), who_, ": the state that was given has masters of ",
                  found->second.toTensor().scalar_type(), " for a parameter of ", parameter.scalar_type(),
                  ", which is stepped as it is. Load it into a model of the dtypes it was saved with.");
      masters.emplace(position, found->second.toTensor());
      values.erase(found);
    }
    each = values.empty() ? state.state.erase(each) : std::next(each);
  }
  return masters;
}

void MasterWeights::set(const ByPosition& masters) {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < all_.size(); ++i) {
    const auto& [parameter, master] = all_[i];
    if (!master.defined()) continue;
    const auto given = masters.find(static_cast<int64_t>(i));
    master.detach().copy_(given == masters.end() ? parameter.detach() : given->second.view_as(master));
  }
}

void MasterWeights::cast(OptimizerStateDict& state) const {
  for (auto& [position, values] : state.state) {
    const auto& [parameter, master] = all_.at(position);
    const auto& stepped = master.defined() ? master : parameter;
    for (auto& [name, value] : values) {
      const bool is_by_element =
          is_elementwise(value, stepped.numel()) || (value.isTensor() && value.toTensor().sizes() == stepped.sizes());
      if (!is_by_element || !value.toTensor().is_floating_point() || !stepped.is_floating_point()) continue;
      value = value.toTensor().to(stepped.scalar_type());
    }
  }
}

}  // namespace lockstep::detail
