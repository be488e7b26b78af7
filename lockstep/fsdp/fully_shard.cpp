#include "lockstep/fsdp/fully_shard.h"

#include <torch/nn/module.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "lockstep/fsdp/construction.h"
#include "lockstep/fsdp/unit_registry.h"
#include "lockstep/fsdp/unit_tree.h"
#include "lockstep/nn/module_tensors.h"
#include "lockstep/optim/clip_grad.h"
#include "lockstep/shard/layout_of.h"

namespace lockstep {
namespace {

using detail::UnitPtr;
using detail::UnitSettings;
using detail::UnitTree;

/// A comm hook in the place of the reduction.
class HookedReduceScatter final : public ReduceScatterComm {
 public:
  explicit HookedReduceScatter(FsdpCommHook hook) : hook_(std::move(hook)) {}

  Pending run(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
              const GroupPtr& group) override {
    hook_(outputs, inputs, group);
    return {};
  }

 private:
  const FsdpCommHook hook_;
};

void check_module(const std::shared_ptr<torch::nn::Module>& module) {
  TORCH_CHECK(module, "[lockstep/fsdp] fully_shard() of a null pointer.");
  TORCH_CHECK(!detail::find_unit(*module), "[lockstep/fsdp] ", module->name(), " is sharded already.");
  TORCH_CHECK(detail::can_be_called(*module), "[lockstep/fsdp] ", module->name(),
              " only holds modules and has no forward. Shard the modules in it.");
}

/// A unit that finds all it could hold in another one would be empty for good.
void check_order_of_sharding(const std::vector<std::shared_ptr<torch::nn::Module>>& modules, const detail::Below& below,
                             bool is_empty) {
  if (!is_empty || !below.units.empty()) return;
  for (const auto& module : modules) {
    const auto parameters = module->parameters();
    const bool is_late = std::any_of(parameters.begin(), parameters.end(),
                                     [](const at::Tensor& parameter) { return has_gathered_layout(parameter); });
    TORCH_CHECK(!is_late, "[lockstep/fsdp] the parameters of ", module->name(),
                " are in the unit of a module around it already. Shard inner modules first.");
  }
}

/// Over the ranks that shard, once more. Collective over the world: all slices of the mesh make theirs at once.
GroupPtr another_sharding_group(const DeviceMesh& mesh) {
  RankArray rows{.shape = {0, mesh.size(mesh.ndim() - 1)}};
  for (const auto& row : tile(mesh.layout().axes().back(), mesh.get_root_mesh().ranks())) {
    rows.ranks.insert(rows.ranks.end(), row.begin(), row.end());
    ++rows.shape[0];
  }
  return DeviceMesh::from_ranks(mesh.device_type(), rows, {.backend_override = {{1, {}}}}).get_group(1);
}

void check_root(const detail::Unit& unit, const char* what) {
  TORCH_CHECK(unit.is_root(), unit.who(), ": ", what, "() is for the root");
}

}  // namespace

FsdpUnit fully_shard(const std::vector<std::shared_ptr<torch::nn::Module>>& modules, const FullyShardOptions& options) {
  TORCH_CHECK(!modules.empty(), "[lockstep/fsdp] fully_shard() of no module.");
  for (const auto& module : modules) check_module(module);
  const auto completed = detail::completed(options, *modules.front());
  const auto below = detail::below(modules, completed);
  for (const auto& unit : below.units) {
    TORCH_CHECK(unit->is_root(), unit->who(), " is inside of another one already");
    TORCH_CHECK(unit->tree().is_unused(), unit->who(), " has run before ", modules.front()->name(),
                " was sharded. Shard all modules before the first forward.");
  }
  detail::prepare(below, completed);
  const auto parameters = detail::parameters_in(below, completed, options.dp_mesh_dims ? options.mesh : std::nullopt);
  check_order_of_sharding(modules, below, parameters.empty());
  const auto between = detail::group_between(completed);
  const auto unit = std::make_shared<detail::Unit>(modules, completed, *completed.mesh);
  unit->shard(parameters);
  detail::put_shards(below, *unit);
  for (const auto& group : unit->groups()) group->set_group_between(between);
  UnitTree::make(unit, below.units);
  for (const auto& module : modules) detail::register_unit(module, unit);
  return FsdpUnit(unit);
}

FsdpUnit fully_shard(torch::nn::Module& module, const FullyShardOptions& options) {
  const auto shared = module.weak_from_this().lock();
  TORCH_CHECK(shared, "[lockstep/fsdp] ", module.name(),
              " is not held by a shared_ptr. Make it by std::make_shared or its holder.");
  return fully_shard(std::vector{shared}, options);
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
      for (const auto& member : group->members()) {
        for (const auto& handle : member.handles) {
          before.emplace(handle.tensor().unsafeGetTensorImpl(), detail::joined_name(prefix, handle.name));
        }
      }
    }
  });
  const bool needs_whole = dynamic_cast<const torch::optim::LBFGS*>(&optimizer) != nullptr;
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      const auto layout = layout_of(parameter);
      TORCH_CHECK(!needs_whole || !layout || layout->mesh().size() == 1,
                  "[lockstep/fsdp] LBFGS takes dot products of all parameters, and these are shards: every rank would ",
                  "step in another direction. Use an optimizer that works element by element, or ",
                  "DistributedDataParallel.");
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
    for (const auto& member : group->members()) {
      for (const auto& handle : member.handles) names.push_back(handle.name);
    }
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
  unit_->tree().set(*unit_, recurse, [&](UnitSettings& s) { s.requires_gradient_sync = requires_gradient_sync; });
}

void FsdpUnit::set_requires_all_reduce(bool requires_all_reduce, bool recurse) {
  unit_->tree().set(*unit_, recurse, [&](UnitSettings& s) { s.requires_all_reduce = requires_all_reduce; });
}

void FsdpUnit::set_is_last_backward(bool is_last_backward) {
  check_root(*unit_, "set_is_last_backward");
  unit_->tree().set_is_last_backward(is_last_backward);
}

void FsdpUnit::set_reshard_after_forward(bool reshard_after_forward, bool recurse) {
  unit_->tree().set(*unit_, recurse, [&](UnitSettings& s) { s.reshard_after_forward = reshard_after_forward; });
}

void FsdpUnit::set_reshard_after_backward(bool reshard_after_backward, bool recurse) {
  unit_->tree().set(*unit_, recurse, [&](UnitSettings& s) { s.reshard_after_backward = reshard_after_backward; });
}

void FsdpUnit::set_unshard_in_backward(bool unshard_in_backward) {
  unit_->tree().set(*unit_, false, [&](UnitSettings& s) { s.unshard_in_backward = unshard_in_backward; });
}

void FsdpUnit::set_modules_to_forward_prefetch(const std::vector<FsdpUnit>& units) {
  unit_->tree().set(*unit_, false, [&](UnitSettings& s) { s.forward_prefetch = in_tree_of(*unit_, units); });
}

void FsdpUnit::set_modules_to_backward_prefetch(const std::vector<FsdpUnit>& units) {
  unit_->tree().set(*unit_, false, [&](UnitSettings& s) { s.backward_prefetch = in_tree_of(*unit_, units); });
}

void FsdpUnit::set_gradient_divide_factor(double factor, bool recurse) {
  TORCH_CHECK(factor > 0, unit_->who(), ": a gradient divide factor of ", factor, "; it must be above 0");
  unit_->tree().set(*unit_, recurse, [&](UnitSettings& s) { s.gradient_divide_factor = factor; });
}

void FsdpUnit::set_reduce_scatter_unused_params(bool reduce_scatter_unused_params, bool recurse) {
  unit_->tree().set(*unit_, recurse,
                    [&](UnitSettings& s) { s.reduce_scatter_unused_params = reduce_scatter_unused_params; });
}

void FsdpUnit::set_all_reduce_hook(std::function<void(const at::Tensor& gradients)> hook,
                                   std::optional<c10::Stream> stream) {
  check_one_mesh("set_all_reduce_hook");
  const auto& mesh = unit_->mesh();
  TORCH_CHECK(!stream || mesh.ndim() == 1, unit_->who(), ": set_all_reduce_hook() with a stream on a mesh with ",
              "replicas, whose sum runs on a stream of its own. Leave the stream out.");
  TORCH_CHECK(!stream || stream->device_type() == at::Device(mesh.device_type()).type(), unit_->who(),
              ": set_all_reduce_hook() with a stream of ", stream->device(), ", and the mesh is one of ",
              mesh.device_type(), ".");
  unit_->tree().set(*unit_, false, [&](UnitSettings& s) {
    s.all_reduce_hook = std::move(hook);
    s.all_reduce_hook_stream = stream;
  });
}

void FsdpUnit::set_post_optim_event(c10::Event event) {
  check_root(*unit_, "set_post_optim_event");
  if (at::Device(unit_->mesh().device_type()).is_cpu()) return;
  TORCH_CHECK(event.was_marked_for_recording(), unit_->who(),
              ": set_post_optim_event() of an event that was not recorded. Record it behind the optimizer's step.");
  unit_->tree().set_post_optim_event(std::move(event));
}

void FsdpUnit::set_custom_all_gather(const std::shared_ptr<AllGatherComm>& comm) {
  TORCH_CHECK(comm, unit_->who(), ": set_custom_all_gather() of a null pointer");
  check_one_mesh("set_custom_all_gather");
  for (const auto& group : unit_->groups()) group->set_all_gather(comm);
}

void FsdpUnit::set_custom_reduce_scatter(const std::shared_ptr<ReduceScatterComm>& comm) {
  TORCH_CHECK(comm, unit_->who(), ": set_custom_reduce_scatter() of a null pointer");
  check_one_mesh("set_custom_reduce_scatter");
  for (const auto& group : unit_->groups()) group->gradients().set_reduce_scatter(comm);
}

void FsdpUnit::register_comm_hook(FsdpCommHook hook) {
  check_root(*unit_, "register_comm_hook");
  TORCH_CHECK(unit_->tree().is_unused(), unit_->who(), ": register_comm_hook() comes before the first forward");
  TORCH_CHECK(unit_->mesh().ndim() == 1, unit_->who(), ": register_comm_hook() on a mesh with replicas");
  TORCH_CHECK(unit_->tree().take_comm_hook(), unit_->who(), ": register_comm_hook() was called before");
  const auto comm = std::make_shared<HookedReduceScatter>(std::move(hook));
  for (const auto& unit : unit_->tree().units()) FsdpUnit(unit).set_custom_reduce_scatter(comm);
}

void FsdpUnit::set_separate_reduce_scatter_group() {
  check_root(*unit_, "set_separate_reduce_scatter_group");
  const auto& mesh = unit_->mesh();
  const auto other = another_sharding_group(mesh);
  for (const auto& unit : unit_->tree().units()) {
    if (!(unit->mesh() == mesh) || unit->has_several_meshes()) continue;
    for (const auto& group : unit->groups()) group->gradients().set_group(other);
  }
}

void FsdpUnit::set_max_reductions_in_flight(int count) {
  check_root(*unit_, "set_max_reductions_in_flight");
  TORCH_CHECK(count >= 1, unit_->who(), ": ", count, " reductions in flight; at least 1 is");
  unit_->tree().set_reductions_in_flight(static_cast<std::size_t>(count));
}

void FsdpUnit::check_one_mesh(const char* what) const {
  TORCH_CHECK(!unit_->has_several_meshes(), unit_->who(), ": ", what, "() on a unit with parameters on several meshes");
}

std::vector<std::weak_ptr<detail::Unit>> FsdpUnit::in_tree_of(const detail::Unit& unit,
                                                              const std::vector<FsdpUnit>& units) {
  std::vector<std::weak_ptr<detail::Unit>> chosen;
  for (const auto& each : units) {
    TORCH_CHECK(&each.unit_->tree() == &unit.tree(), unit.who(), " is to gather unit '", each.name(),
                "' ahead, which is under another root.");
    chosen.push_back(each.unit_);
  }
  return chosen;
}

void FsdpUnit::backward(const at::Tensor& loss, double weight) {
  check_root(*unit_, "backward");
  unit_->tree().backward(loss, weight);
}

FsdpNoSync FsdpUnit::no_sync() {
  return FsdpNoSync(unit_);
}

void FsdpUnit::reset_iter_state() {
  check_root(*unit_, "reset_iter_state");
  unit_->tree().reset();
}

SummonGuard FsdpUnit::summon_full_params(const SummonOptions& options) {
  return {unit_->tree().below(*unit_, options.recurse), options};
}

void FsdpUnit::apply(const std::function<void(torch::nn::Module& module)>& function) {
  const auto module = unit_->module();
  TORCH_CHECK(module, unit_->who(), ": the module is gone");
  const auto summoned = summon_full_params();
  module->apply(function);
}

at::Tensor FsdpUnit::clip_grad_norm_(double max_norm, double norm_type) {
  check_root(*unit_, "clip_grad_norm_");
  const auto module = unit_->module();
  TORCH_CHECK(module, unit_->who(), ": the module is gone");
  return lockstep::clip_grad_norm_(module->parameters(), max_norm, {.norm_type = norm_type});
}

FsdpNoSync::FsdpNoSync(std::shared_ptr<detail::Unit> root) : root_(std::move(root)) {
  check_root(*root_, "no_sync");
  TORCH_CHECK(root_->tree().is_idle(), root_->who(), ": no_sync() inside of a backward");
  root_->tree().begin_no_sync();
}

FsdpNoSync::~FsdpNoSync() {
  if (!root_) return;  // moved away
  root_->tree().end_no_sync();
}

}  // namespace lockstep
