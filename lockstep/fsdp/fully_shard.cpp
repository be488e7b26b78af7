#include "lockstep/fsdp/fully_shard.h"

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "lockstep/base/str.h"
#include "lockstep/comm/world.h"
#include "lockstep/fsdp/unit_registry.h"
#include "lockstep/intercept/deferred_init.h"
#include "lockstep/nn/module_tensors.h"
#include "lockstep/optim/clip_grad.h"
#include "lockstep/shard/layout_of.h"

namespace lockstep {
namespace {

using detail::UnitPtr;
using detail::UnitTree;
using detail::WholeParameter;

DeviceMesh mesh_of(const FullyShardOptions& options) {
  if (!options.mesh) return DeviceMesh::from_group(default_group(), "cpu");
  const auto& mesh = *options.mesh;
  TORCH_CHECK(mesh.ndim() <= 2, "[lockstep/fsdp] a mesh of ", mesh.ndim(),
              " axes: one axis shards, of two the first replicates and the second shards.");
  TORCH_CHECK(mesh.ndim() == 1 || !mesh.mesh_dim_names().empty(),
              "[lockstep/fsdp] a mesh of two axes needs names, so that it is plain which one replicates: ",
              "init_device_mesh(\"cpu\", {2, 2}, {.mesh_dim_names = {\"replicate\", \"shard\"}}).");
  TORCH_CHECK(mesh.is_member(), "[lockstep/fsdp] rank ", mesh.get_rank(), " is not in ", mesh.to_string());
  return mesh;
}

/// The units right below `module`, and all modules that belong to no unit.
struct Below {
  std::vector<UnitPtr> units;
  std::vector<std::pair<std::string, torch::nn::Module*>> modules;
};

void collect(const std::string& name, torch::nn::Module& module, std::unordered_set<const void*>& seen, Below& below) {
  if (!seen.insert(&module).second) return;
  below.modules.emplace_back(name, &module);
  for (const auto& child : module.named_children()) {
    if (auto unit = detail::find_unit(*child.value())) {
      if (std::find(below.units.begin(), below.units.end(), unit) == below.units.end()) below.units.push_back(unit);
    } else {
      collect(detail::joined_name(name, child.key()), *child.value(), seen, below);
    }
  }
}

void check_parameter(const std::string& name, const at::Tensor& tensor, int rank) {
  const auto who = str("[lockstep/fsdp] rank ", rank, ": parameter '", name, "'");
  TORCH_CHECK(tensor.dim() > 0, who, " has no dim that could be cut. Make it one-dimensional, of one element.");
  TORCH_CHECK(tensor.layout() == at::kStrided && tensor.is_contiguous(), who,
              " is not contiguous. Call contiguous() on it before fully_shard().");
  TORCH_CHECK(
      !storage_owner_of(tensor), who,
      " is in another unit already. Shard modules that share a parameter as one unit, the one that holds both.");
  TORCH_CHECK(tensor.is_leaf(), who, " was computed from other tensors. Shard what it was computed from.");
}

/// Each parameter once; materialised if it was built without memory.
std::vector<WholeParameter> parameters_in(const Below& below, const FullyShardOptions& options, int rank) {
  std::unordered_set<const void*> left_out;
  for (const auto& ignored : options.ignored_params) left_out.insert(ignored.unsafeGetTensorImpl());
  std::vector<WholeParameter> parameters;
  for (const auto& [prefix, module] : below.modules) {
    for (const auto& item : module->named_parameters(/*recurse=*/false)) {
      const auto name = detail::joined_name(prefix, item.key());
      if (!item.value().defined() || layout_of(item.value())) continue;
      if (!left_out.insert(item.value().unsafeGetTensorImpl()).second) continue;
      if (is_deferred(item.value())) materialize_tensor(item.value());
      check_parameter(name, item.value(), rank);
      parameters.push_back({name, item.value()});
    }
    for (const auto& buffer : module->named_buffers(/*recurse=*/false)) {
      if (is_deferred(buffer.value())) materialize_tensor(buffer.value());
    }
  }
  at::ScalarType dtype = at::kFloat;
  const std::string* first = nullptr;
  for (const auto& [name, tensor] : parameters) {
    if (!tensor.requires_grad()) continue;
    if (first == nullptr) {
      first = &name;
      dtype = tensor.scalar_type();
    }
    TORCH_CHECK(tensor.scalar_type() == dtype, "[lockstep/fsdp] rank ", rank, ": parameters '", *first, "' and '", name,
                "' of one unit are ", dtype, " and ", tensor.scalar_type(),
                ". Trainable parameters of a unit have one dtype; make one of the modules a unit of its own.");
  }
  return parameters;
}

void put_shards(const Below& below, const detail::Unit& unit) {
  std::unordered_map<const void*, at::Tensor> shards;
  for (const auto& group : unit.groups()) {
    for (std::size_t i = 0; i < group->count(); ++i) {
      shards.emplace(group->whole(i).unsafeGetTensorImpl(), group->shard(i));
    }
  }
  for (const auto& [prefix, module] : below.modules) {
    for (auto& item : detail::ModuleAccess::parameters_of(*module)) {
      const auto found = shards.find(item.value().unsafeGetTensorImpl());
      if (found != shards.end()) item.value() = found->second;
    }
  }
}

}  // namespace

FsdpUnit fully_shard(torch::nn::Module& module, const FullyShardOptions& options) {
  const auto shared = module.weak_from_this().lock();
  TORCH_CHECK(shared, "[lockstep/fsdp] ", module.name(),
              " is not held by a shared_ptr. Make it by std::make_shared or its holder.");
  TORCH_CHECK(!detail::find_unit(module), "[lockstep/fsdp] ", module.name(), " is sharded already.");
  TORCH_CHECK(detail::can_be_called(module), "[lockstep/fsdp] ", module.name(),
              " only holds modules and has no forward. Shard the modules in it.");
  const auto mesh = mesh_of(options);
  Below below;
  std::unordered_set<const void*> seen;
  collect("", module, seen, below);
  for (const auto& unit : below.units) {
    TORCH_CHECK(unit->is_root(), unit->who(), " is inside of another one already");
    TORCH_CHECK(unit->tree().is_unused(), unit->who(), " has run before ", module.name(),
                " was sharded. Shard all modules before the first forward.");
  }
  const auto parameters = parameters_in(below, options, mesh.get_rank());
  const auto unit = std::make_shared<detail::Unit>(shared, options, mesh);
  unit->shard(parameters);
  put_shards(below, *unit);
  UnitTree::make(unit, below.units);
  detail::register_unit(shared, unit);
  return FsdpUnit(unit);
}

std::optional<FsdpUnit> unit_of(const torch::nn::Module& module) {
  auto unit = detail::find_unit(module);
  if (!unit) return std::nullopt;
  return FsdpUnit(std::move(unit));
}

void check_optimizer(const torch::nn::Module& module, const torch::optim::Optimizer& optimizer) {
  std::unordered_map<const void*, std::string> before;
  detail::for_each_module(module, [&](const std::string& prefix, const torch::nn::Module& each) {
    const auto unit = detail::find_unit(each);
    if (!unit) return;
    for (const auto& group : unit->groups()) {
      for (std::size_t i = 0; i < group->count(); ++i) {
        before.emplace(group->whole(i).unsafeGetTensorImpl(), detail::joined_name(prefix, group->name(i)));
      }
    }
  });
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      const auto found = before.find(parameter.unsafeGetTensorImpl());
      TORCH_CHECK(found == before.end(), "[lockstep/fsdp] the optimizer holds parameter '", found->second,
                  "' as it was before sharding, which no gradient reaches. Make the optimizer after fully_shard().");
    }
  }
}

const std::string& FsdpUnit::name() const {
  return unit_->name();
}

const FullyShardOptions& FsdpUnit::options() const {
  return unit_->options();
}

bool FsdpUnit::is_root() const {
  return unit_->is_root();
}

std::vector<std::string> FsdpUnit::parameter_names() const {
  std::vector<std::string> names;
  for (const auto& group : unit_->groups()) {
    for (std::size_t i = 0; i < group->count(); ++i) names.push_back(group->name(i));
  }
  return names;
}

void FsdpUnit::unshard(bool async) {
  unit_->tree().unshard(*unit_, async);
}

void FsdpUnit::reshard() {
  unit_->tree().reshard(*unit_);
}

void FsdpUnit::set_requires_gradient_sync(bool requires_gradient_sync, bool recurse) {
  unit_->tree().set_requires_gradient_sync(*unit_, requires_gradient_sync, recurse);
}

void FsdpUnit::set_reshard_after_forward(bool reshard_after_forward, bool recurse) {
  unit_->tree().set_reshard_after_forward(*unit_, reshard_after_forward, recurse);
}

void FsdpUnit::set_reshard_after_backward(bool reshard_after_backward, bool recurse) {
  unit_->tree().set_reshard_after_backward(*unit_, reshard_after_backward, recurse);
}

void FsdpUnit::set_gradient_divide_factor(double factor) {
  TORCH_CHECK(factor > 0, unit_->who(), ": a gradient divide factor of ", factor, "; it must be above 0");
  unit_->tree().set_gradient_divide_factor(factor);
}

FsdpNoSync FsdpUnit::no_sync() {
  return FsdpNoSync(unit_);
}

void FsdpUnit::reset_iter_state() {
  TORCH_CHECK(is_root(), unit_->who(), ": reset_iter_state() is for the root");
  unit_->tree().reset();
}

SummonGuard FsdpUnit::summon_full_params(const SummonOptions& options) {
  return {unit_->tree().below(*unit_, options.recurse), options.writeback};
}

at::Tensor FsdpUnit::clip_grad_norm_(double max_norm, double norm_type) {
  TORCH_CHECK(is_root(), unit_->who(), ": clip_grad_norm_() is for the root");
  const auto module = unit_->module();
  TORCH_CHECK(module, unit_->who(), ": the module is gone");
  return lockstep::clip_grad_norm_(module->parameters(), max_norm, {.norm_type = norm_type});
}

FsdpNoSync::FsdpNoSync(std::shared_ptr<detail::Unit> root) : root_(std::move(root)) {
  TORCH_CHECK(root_->is_root(), root_->who(), ": no_sync() is for the root");
  TORCH_CHECK(root_->tree().is_idle(), root_->who(), ": no_sync() inside of a backward");
  root_->tree().set_requires_gradient_sync(*root_, false, /*recurse=*/true);
}

FsdpNoSync::~FsdpNoSync() {
  root_->tree().set_requires_gradient_sync(*root_, true, /*recurse=*/true);
}

SummonGuard::SummonGuard(const std::vector<std::shared_ptr<detail::Unit>>& units, bool writeback)
    : writeback_(writeback) {
  for (const auto& unit : units) {
    unit->tree().summon(*unit);
    units_.push_back(unit);
  }
}

SummonGuard::~SummonGuard() {
  for (const auto& unit : units_) unit->tree().end_summon(*unit, writeback_);
}

}  // namespace lockstep
