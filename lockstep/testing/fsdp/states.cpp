#include "lockstep/testing/fsdp/states.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <utility>

#include "lockstep/base/str.h"
#include "lockstep/comm/objects.h"
#include "lockstep/comm/values.h"
#include "lockstep/fsdp/refused_gradient.h"
#include "lockstep/fsdp/unit_registry.h"
#include "lockstep/nn/module_tensors.h"
#include "lockstep/testing/fsdp/test_model.h"
#include "lockstep/testing/run.h"

namespace lockstep::testing {
namespace {

using TensorDict = c10::Dict<std::string, at::Tensor>;

TensorDict host_copies(const torch::nn::Module& model) {
  TensorDict copies;
  for (const auto& item : model.named_parameters()) copies.insert(item.key(), item.value().detach().cpu().clone());
  for (const auto& item : model.named_buffers()) copies.insert(item.key(), item.value().detach().cpu().clone());
  return copies;
}

struct FoundUnit {
  std::string name;  // dotted, below the module it was looked for in
  lockstep::detail::UnitPtr unit;

  std::string describe() const { return name.empty() ? "the root" : lockstep::str("unit '", name, "'"); }
};

/// Inner ones first.
std::vector<FoundUnit> found_units(const torch::nn::Module& model) {
  std::vector<FoundUnit> units;
  lockstep::detail::for_each_module(model, [&](const std::string& name, const torch::nn::Module& module) {
    if (auto unit = lockstep::detail::find_unit(module)) units.push_back({name, std::move(unit)});
  });
  std::reverse(units.begin(), units.end());
  return units;
}

}  // namespace

void assert_module_states(
    const torch::nn::Module& model, const GroupPtr& group,
    const std::function<void(const std::string& name, const at::Tensor& first, const at::Tensor& other)>& check) {
  const auto bytes = torch::jit::pickle_save(host_copies(model));
  std::vector<TensorDict> states;
  for (const auto& each : all_gather_object(std::string(bytes.begin(), bytes.end()), group)) {
    const auto state = torch::jit::pickle_load({each.begin(), each.end()}).toGenericDict();
    TensorDict typed;
    for (const auto& item : state) typed.insert(item.key().toStringRef(), item.value().toTensor());
    states.push_back(std::move(typed));
  }
  for (std::size_t rank = 1; rank < states.size(); ++rank) {
    if (states[rank].size() != states[0].size()) {
      throw CheckFailure(
          str("rank ", rank, " has ", states[rank].size(), " parameters and buffers, rank 0 has ", states[0].size()));
    }
    for (const auto& item : states[0]) {
      const auto& name = item.key();
      if (!states[rank].contains(name)) throw CheckFailure(str("rank ", rank, " has no '", name, "', rank 0 has"));
      try {
        check(name, item.value(), states[rank].at(name));
      } catch (const std::exception& error) {
        throw CheckFailure(str("'", name, "' of rank ", rank, " is not as on rank 0: ", error.what()));
      }
    }
  }
}

void visit_full_params(const torch::nn::Module& model,
                       const std::function<void(const std::string& name, const at::Tensor& whole)>& visit,
                       bool recurse) {
  const at::NoGradGuard no_grad;
  auto units = found_units(model);
  if (!recurse) std::erase_if(units, [](const FoundUnit& each) { return !each.name.empty(); });
  std::vector<SummonGuard> guards;
  for (const auto& each : units) guards.push_back(FsdpUnit(each.unit).summon_full_params({.recurse = false}));
  for (const auto& [name, tensor] : lockstep::detail::parameters_of(model, {})) {
    if (!name.ends_with("_flat_param")) visit(name, tensor);
  }
  // Flat parameters have many, whose names only the unit knows.
  for (const auto& each : units) {
    if (each.unit->options().use_orig_params) continue;
    for_each_handle(*each.unit, [&](const lockstep::detail::WholeHandle& handle, std::size_t /*number*/) {
      visit(lockstep::detail::joined_name(each.name, handle.name), handle.tensor());
    });
  }
}

void zero_model(torch::nn::Module& model, const ZeroModelOptions& options) {
  const at::NoGradGuard no_grad;
  if (options.summon) {
    visit_full_params(model, [](const std::string& /*name*/, const at::Tensor& whole) { whole.zero_(); });
  } else {
    for (const auto& parameter : model.parameters()) parameter.zero_();
  }
  if (!options.zero_buffers) return;
  for (const auto& buffer : model.buffers()) buffer.zero_();
}

ModuleState get_full_params(const torch::nn::Module& model, bool recurse) {
  ModuleState params;
  const auto copy = [&](const std::string& name, const at::Tensor& whole) {
    params.emplace(name, whole.detach().to(compute_device(), whole.scalar_type(), /*non_blocking=*/false,
                                           /*copy=*/true));
  };
  visit_full_params(model, copy, recurse);
  return params;
}

ModuleState state_dict(const torch::nn::Module& model, const TestStateOptions& options) {
  auto state = full_state_dict(model, {.cpu_offload = options.cpu_offload});
  for (auto& [name, tensor] : state) {
    if (!options.cpu_offload) tensor = tensor.to(compute_device());
    if (options.half && tensor.is_floating_point()) tensor = tensor.to(at::kHalf);
  }
  return state;
}

ModuleState broadcast_state_dict(const ModuleState& state, const GroupPtr& group) {
  TensorDict sent;
  for (const auto& [name, tensor] : state) sent.insert(name, tensor.cpu());
  const auto received = broadcast_value(sent, 0, group, at::kCPU).toGenericDict();
  ModuleState result;
  for (const auto& item : received) {
    result.emplace(item.key().toStringRef(), item.value().toTensor().to(compute_device()));
  }
  return result;
}

std::vector<FsdpUnit> units_of(const torch::nn::Module& model) {
  std::vector<FsdpUnit> units;
  for (const auto& each : found_units(model)) units.emplace_back(each.unit);
  return units;
}

void check_units(const torch::nn::Module& model, const std::string& what,
                 const std::function<bool(const FullyShardOptions& options)>& is_right) {
  const auto units = found_units(model);
  if (units.empty()) throw CheckFailure(str(what, ": no module of ", model.name(), " is a unit"));
  std::vector<std::string> wrong;
  for (const auto& each : units) {
    if (!is_right(each.unit->options())) wrong.push_back(each.describe());
  }
  if (!wrong.empty()) throw CheckFailure(str(what, " does not hold for ", join(wrong, ", ")));
}

void check_units_are_idle(const torch::nn::Module& model) {
  for (const auto& each : found_units(model)) {
    // One rank alone has nothing to free.
    const bool frees = each.unit->mesh().size(each.unit->mesh().ndim() - 1) > 1;
    for_each_handle(*each.unit, [&](const lockstep::detail::WholeHandle& handle, std::size_t /*number*/) {
      const auto whole = handle.tensor();
      if (!whole.defined()) return;
      const auto what = str("parameter '", handle.name, "' of ", each.describe());
      if (frees && whole.storage().nbytes() > 0) throw CheckFailure(str(what, " is still whole after the step"));
      const auto& grad = whole.grad();
      // One that only refuses to be used is none.
      const bool has_gradient = grad.defined() && !lockstep::detail::is_refused(grad);
      if (has_gradient || handle.kept_grad.defined()) {
        throw CheckFailure(str(what, " has a gradient that was not reduced"));
      }
    });
  }
}

}  // namespace lockstep::testing
