#include "lockstep/fsdp/summon.h"

#include <ATen/ops/equal.h>
#include <c10/core/GradMode.h>
#include <c10/util/accumulate.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <string>
#include <unordered_map>
#include <utility>

#include "lockstep/base/str.h"
#include "lockstep/comm/agreement.h"
#include "lockstep/fsdp/unit_registry.h"
#include "lockstep/fsdp/unit_tree.h"
#include "lockstep/intercept/operator_scope.h"
#include "lockstep/nn/module_access.h"
#include "lockstep/shard/gather.h"

namespace lockstep {
namespace {

/// What a module computes with, while it is whole. The tensor object stays; for the scope it has other memory.
struct SummonedHandle {
  at::Tensor values;       // in those of the parameter
  at::Tensor whole = {};   // the module's member; `values` if there is none any more
  at::Tensor before = {};  // what the member's memory was
};

/// A parameter while it is whole: one handle, or all that a flat one consists of.
struct Summoned {
  std::string name;
  at::Tensor shard;
  Layout layout;             // of what modules compute with
  at::Tensor values = {};    // of the whole parameter
  at::Tensor gradient = {};  // undefined if not asked for, or if there is none
  std::vector<SummonedHandle> handles = {};
};

/// Where a module registers a parameter.
struct Registration {
  std::shared_ptr<torch::nn::Module> module;
  std::string key;
  std::size_t parameter;
};

void check_summon_options(const detail::Unit& unit, const SummonOptions& options) {
  TORCH_CHECK(!options.writeback || !options.rank0_only, unit.who(),
              ": summon_full_params() with rank0_only and writeback: ranks would keep different things. Set "
              "writeback = false, and change parameters on all ranks.");
  TORCH_CHECK(!options.with_grads || !options.offload_to_cpu, unit.who(),
              ": summon_full_params() with with_grads and offload_to_cpu, which is not possible. Leave one out.");
}

/// Gives `shard` this rank's part of `whole`, unless it has it: a write where nothing changed would be one between
/// forward and backward.
void keep_part(const at::Tensor& shard, const Layout& layout, const at::Tensor& whole, const std::string& name) {
  if (whole.sizes() != at::IntArrayRef(layout.sizes())) {
    TORCH_WARN("[lockstep/fsdp] rank ", layout.mesh().get_rank(), ": what was written to parameter '", name,
               "' inside of summon_full_params() is not kept: it has sizes ", whole.sizes(), " now, not ",
               at::IntArrayRef(layout.sizes()), ".");
    return;
  }
  const auto part = layout.cut(whole).to(shard.options());
  if (!at::equal(part, shard)) shard.copy_(part);
}

}  // namespace

namespace detail {

class Summon {
 public:
  Summon(const std::vector<UnitPtr>& units, const SummonOptions& options) : options_(options) {
    if (units.empty()) return;
    check_summon_options(*units.back(), options);
    try {
      for (const auto& unit : units) {
        unit->tree().begin_summon(*unit);
        units_.push_back(unit);
      }
      gather();
    } catch (...) {
      end_units();
      throw;
    }
    put_whole();
  }

  ~Summon() {
    try {
      put_back();
    } catch (const std::exception& error) {
      TORCH_WARN("[lockstep/fsdp] the end of summon_full_params(): ", error.what());
    }
    end_units();
  }

  Summon(const Summon&) = delete;
  Summon& operator=(const Summon&) = delete;

 private:
  void gather() {
    const at::NoGradGuard no_grad;
    for (const auto& unit : units_) {
      const auto first = parameters_.size();
      std::string gradients;
      for (const auto& group : unit->groups()) {
        for (const auto& member : group->members()) {
          check_gradients(*unit, member);
          parameters_.push_back({.name = member.name, .shard = member.shard, .layout = group->division_of(member)});
          gradients += member.shard.grad().defined() ? 'y' : 'n';
        }
      }
      if (options_.with_grads && parameters_.size() > first) {
        const auto& mesh = parameters_[first].layout.mesh();
        check_same_on_all_ranks(str("which gradients FSDP unit '", unit->name(), "' has"), gradients,
                                mesh.get_group(mesh.ndim() - 1));
      }
      auto next = first;
      for (const auto& group : unit->groups()) {
        for (const auto& member : group->members()) gather(parameters_[next++], member);
      }
    }
  }

  void check_gradients(const Unit& unit, const Member& member) const {
    if (!options_.with_grads) return;
    TORCH_CHECK(unit.options().use_orig_params, unit.who(),
                ": summon_full_params() with with_grads of a flat parameter. Set use_orig_params.");
    TORCH_CHECK(!member.handles.front().kept_grad.defined(), unit.who(),
                ": summon_full_params() with with_grads while the gradient of parameter '", member.name,
                "' waits to be reduced. Run a backward outside of no_sync() first.");
  }

  void gather(Summoned& each, const Member& member) const {
    auto values = gather_whole(each.shard, each.layout);
    at::Tensor gradient;
    if (options_.with_grads && each.shard.grad().defined()) gradient = gather_whole(each.shard.grad(), each.layout);
    const auto& mesh = each.layout.mesh();
    if (options_.rank0_only && mesh.get_rank() != mesh.ranks().front()) return;
    each.values = options_.offload_to_cpu ? values.cpu() : values;
    each.gradient = gradient;
    for (const auto& handle : member.handles) {
      const auto elements = c10::multiply_integers(handle.sizes);
      const auto part = each.values.view({-1}).narrow(0, handle.offset, elements).view(handle.sizes);
      each.handles.push_back({.values = part.detach(), .whole = handle.tensor()});
    }
  }

  void put_whole() {
    std::unordered_map<const void*, std::size_t> by_shard;
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      auto& each = parameters_[i];
      if (!each.values.defined()) continue;
      for (auto& handle : each.handles) {
        if (handle.whole.defined()) {
          const NotIntercepted below;
          handle.before = handle.whole.variable_data();
          handle.whole.set_data(handle.values);
        } else {
          handle.whole = handle.values;
        }
        handle.whole.set_requires_grad(each.shard.requires_grad());
        if (options_.with_grads) handle.whole.mutable_grad() = each.gradient;
      }
      if (each.name != kFlatName) by_shard.emplace(each.shard.unsafeGetTensorImpl(), i);
    }
    for (const auto& unit : units_) {
      const auto root = unit->module();
      if (!root) continue;
      put_names(*unit, *root);
      for (const auto& module : root->modules()) {
        for (auto& item : ModuleAccess::parameters_of(*module)) {
          const auto found = by_shard.find(item.value().unsafeGetTensorImpl());
          if (found == by_shard.end()) continue;
          registrations_.push_back({module, item.key(), found->second});
          item.value() = parameters_[found->second].handles.front().whole;
        }
      }
    }
  }

  /// Registers what a flat parameter consists of in its place.
  void put_names(const Unit& unit, torch::nn::Module& module) {
    if (unit.flat_names().empty()) return;
    const auto& shard = unit.groups().front()->members().front().shard;
    const auto is_it = [&](const Summoned& each) { return each.shard.is_same(shard); };
    const auto found = std::find_if(parameters_.begin(), parameters_.end(), is_it);
    if (found == parameters_.end() || found->handles.empty()) return;
    ModuleAccess::parameters_of(module).erase(kFlatName);
    for (const auto& flat : unit.flat_names()) {
      const auto owner = flat.module.lock();
      if (owner) ModuleAccess::parameters_of(*owner).insert(flat.key, found->handles[flat.handle].whole);
    }
  }

  void take_names_back() {
    for (const auto& unit : units_) {
      const auto module = unit->module();
      if (!module || unit->flat_names().empty()) continue;
      auto& registered = ModuleAccess::parameters_of(*module);
      if (registered.contains(kFlatName)) continue;
      for (const auto& flat : unit->flat_names()) {
        if (const auto owner = flat.module.lock()) ModuleAccess::parameters_of(*owner).erase(flat.key);
      }
      registered.insert(kFlatName, unit->groups().front()->members().front().shard);
    }
  }

  void put_back() {
    const at::NoGradGuard no_grad;
    take_names_back();
    for (const auto& [module, key, index] : registrations_) {
      auto* registered = ModuleAccess::parameters_of(*module).find(key);
      if (registered != nullptr && registered->is_same(parameters_[index].handles.front().whole)) {
        *registered = parameters_[index].shard;
      }
    }
    for (auto& each : parameters_) {
      if (!each.values.defined()) continue;
      at::Tensor gradient;
      auto values = each.values;
      for (auto& handle : each.handles) {
        const auto written = handle.whole.variable_data();
        gradient = std::exchange(handle.whole.mutable_grad(), {});
        if (handle.before.defined()) {
          const NotIntercepted below;
          handle.whole.set_data(handle.before);
        }
        // The program may have exchanged its memory.
        if (each.name != kFlatName) {
          values = written;
        } else if (!written.is_alias_of(handle.values)) {
          handle.values.copy_(written);
        }
      }
      if (!options_.writeback) continue;
      keep_part(each.shard.detach(), each.layout, values, each.name);
      if (options_.with_grads) keep_gradient(each, gradient);
    }
  }

  static void keep_gradient(const Summoned& each, const at::Tensor& whole) {
    auto& gradient = each.shard.mutable_grad();
    if (!whole.defined()) {
      gradient.reset();
    } else if (gradient.defined()) {
      keep_part(gradient, each.layout, whole, each.name + ".grad");
    } else {
      gradient = each.layout.cut(whole).clone();
    }
  }

  void end_units() noexcept {
    for (const auto& unit : units_) unit->tree().end_summon(*unit);
  }

  const SummonOptions options_;
  std::vector<UnitPtr> units_;
  std::vector<Summoned> parameters_;
  std::vector<Registration> registrations_;
};

}  // namespace detail

SummonGuard::SummonGuard(const std::vector<std::shared_ptr<detail::Unit>>& units, const SummonOptions& options)
    : summon_(std::make_unique<detail::Summon>(units, options)) {}
SummonGuard::~SummonGuard() = default;
SummonGuard::SummonGuard(SummonGuard&&) noexcept = default;

}  // namespace lockstep
