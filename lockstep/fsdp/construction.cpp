#include "lockstep/fsdp/construction.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <numeric>
#include <unordered_map>

#include "lockstep/base/str.h"
#include "lockstep/comm/agreement.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/world.h"
#include "lockstep/fsdp/two_dimensional.h"
#include "lockstep/fsdp/unit_registry.h"
#include "lockstep/intercept/deferred_init.h"
#include "lockstep/nn/module_access.h"
#include "lockstep/nn/module_tensors.h"
#include "lockstep/shard/layout_of.h"

namespace lockstep::detail {
namespace {

void check_mesh(const DeviceMesh& mesh) {
  TORCH_CHECK(mesh.ndim() <= 2, "[lockstep/fsdp] a mesh of ", mesh.ndim(),
              " axes: one axis shards, of two the first replicates and the second shards.");
  TORCH_CHECK(mesh.ndim() == 1 || !mesh.mesh_dim_names().empty(),
              "[lockstep/fsdp] a mesh of two axes needs names, so that it is plain which one replicates: ",
              "init_device_mesh(\"cpu\", {2, 2}, {.mesh_dim_names = {\"replicate\", \"shard\"}}).");
  TORCH_CHECK(mesh.is_member(), "[lockstep/fsdp] rank ", mesh.get_rank(), " is not in ", mesh.to_string());
}

void apply_strategy(FullyShardOptions& options) {
  const auto strategy = *options.sharding_strategy;
  TORCH_CHECK(!options.reshard_after_forward,
              "[lockstep/fsdp] sharding_strategy and reshard_after_forward say the same: give one of them.");
  const bool is_hybrid = strategy == ShardingStrategy::kHybridShard || strategy == ShardingStrategy::kHybridShardZero2;
  TORCH_CHECK(is_hybrid == (options.mesh->ndim() == 2),
              "[lockstep/fsdp] a hybrid sharding strategy needs a mesh of two named axes (replicate, shard), and ",
              "others one of one axis; this is ", options.mesh->to_string(), ".");
  if (strategy == ShardingStrategy::kNoShard) {
    TORCH_WARN_ONCE(
        "[lockstep/fsdp] ShardingStrategy::kNoShard divides nothing: DistributedDataParallel does the same with less.");
    const auto& mesh = *options.mesh;
    const auto& names = mesh.mesh_dim_names();
    options.mesh = names.empty() ? DeviceMesh::from_ranks(mesh.device_type(), {mesh.ranks(), {mesh.size(), 1}},
                                                          {.mesh_dim_names = {"replicate", "shard"}})
                                 : mesh.with_axis_of_one(names.front() + "_alone");
  }
  const bool keeps = strategy == ShardingStrategy::kShardGradOp || strategy == ShardingStrategy::kHybridShardZero2;
  if (keeps) options.reshard_after_forward = false;
}

void collect(const std::string& name, torch::nn::Module& module, std::unordered_set<const void*>& seen, Below& below) {
  if (!seen.insert(&module).second) return;
  below.modules.emplace_back(name, &module);
  for (const auto& child : module.named_children()) {
    if (auto unit = find_unit(*child.value())) {
      if (std::find(below.units.begin(), below.units.end(), unit) == below.units.end()) below.units.push_back(unit);
    } else {
      collect(joined_name(name, child.key()), *child.value(), seen, below);
    }
  }
}

/// Calls visit(name, tensor) for what the modules hold themselves, each tensor once, sharded ones not.
template <class Visit>
void for_each_state(const Below& below, const FullyShardOptions& options, const Visit& visit) {
  std::unordered_set<const void*> seen;
  for (const auto& ignored : options.ignored_params) seen.insert(ignored.unsafeGetTensorImpl());
  for (const auto& [prefix, module] : below.modules) {
    for (const auto& item : module->named_parameters(/*recurse=*/false)) {
      const auto& tensor = item.value();
      if (!tensor.defined() || has_gathered_layout(tensor) || !seen.insert(tensor.unsafeGetTensorImpl()).second)
        continue;
      visit(joined_name(prefix, item.key()), tensor, /*is_buffer=*/false);
    }
    for (const auto& item : module->named_buffers(/*recurse=*/false)) {
      const auto& tensor = item.value();
      if (!tensor.defined() || !seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
      visit(joined_name(prefix, item.key()), tensor, /*is_buffer=*/true);
    }
  }
}

/// Gives memory to what has none: as it was built in deferred_init(), or as param_init_fn says.
void fill_unmaterialised(const Below& below, const FullyShardOptions& options, at::Device device) {
  for (const auto& [name, module] : below.modules) {
    bool is_filled = true;
    for (const auto& list : {module->named_parameters(false), module->named_buffers(false)}) {
      for (const auto& item : list) {
        if (!item.value().defined() || !item.value().is_meta()) continue;
        if (is_deferred(item.value())) {
          materialize_tensor(item.value());
          is_filled = is_filled && !options.param_init_fn;
        } else {
          materialize_empty(item.value(), device);
          is_filled = false;
        }
      }
    }
    if (is_filled) continue;
    TORCH_CHECK(options.param_init_fn, "[lockstep/fsdp] ", module->name(), " has parameters on the meta device, and ",
                "nothing says how to fill them. Build it in deferred_init(), or give a param_init_fn.");
    options.param_init_fn(*module);
  }
}

at::Device device_of(const FullyShardOptions& options) {
  if (options.device_id) {
    TORCH_CHECK(options.device_id->type() == at::Device(options.mesh->device_type()).type(),
                "[lockstep/fsdp] device_id is ", *options.device_id, ", and the mesh one of ",
                options.mesh->device_type(), ".");
    if (options.device_id->has_index() || options.device_id->is_cpu()) return *options.device_id;
  }
  const at::Device kind(options.mesh->device_type());
  if (kind.is_cpu()) return kind;
  const auto current = c10::impl::VirtualGuardImpl(kind.type()).getDevice();
  if (options.device_id) {
    TORCH_WARN_ONCE("[lockstep/fsdp] device_id ", *options.device_id, " has no index: ", current, " is taken.");
  }
  return current;
}

void place(const at::Tensor& tensor, at::Device device, const std::string& name) {
  if (tensor.device() == device) return;
  TORCH_CHECK(tensor.device().is_cpu(), "[lockstep/fsdp] '", name, "' is on ", tensor.device(), " and the unit on ",
              device, ". Build it there, or on the CPU.");
  const at::NoGradGuard no_grad;
  tensor.set_data(tensor.to(device));
}

void send_states(const Below& below, const FullyShardOptions& options) {
  std::vector<at::Tensor> states;
  for_each_state(below, options, [&](const std::string&, const at::Tensor& tensor, bool) {
    if (tensor.numel() > 0) states.push_back(tensor.detach());
  });
  const LabelScope label({"FSDP's sync_module_states"});
  for (const auto& group : options.mesh->get_all_groups()) {
    for (const auto& state : states) broadcast(state, 0, group);
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

/// Rows by rank, where they are not divided by the chunk rule.
std::vector<int64_t> balanced_rows(const WholeParameter& parameter, const FullyShardOptions& options, int64_t ranks) {
  const auto& tensor = parameter.tensor;
  const auto& before = parameter.cut_before;
  // Of the whole tensor: ranks that hold other parts of the rows, or nothing of them, decide alike.
  const auto elements = before ? before->numel() : tensor.numel();
  if (!options.balance || !options.use_orig_params || elements == 0 || is_cut_twice(parameter)) return {};
  return options.balance->divide(tensor.size(0), elements / tensor.size(0) * static_cast<int64_t>(tensor.itemsize()),
                                 ranks);
}

/// Where a parameter is cut.
std::pair<DeviceMesh, WholeParameter> placed(const std::string& name, const at::Tensor& tensor,
                                             const FullyShardOptions& options,
                                             const std::optional<DeviceMesh>& spmd_mesh) {
  const auto asked = options.shard_placement_fn ? options.shard_placement_fn(name, tensor) : std::nullopt;
  auto mesh = asked ? asked->mesh.value_or(*options.mesh) : *options.mesh;
  const auto ranks = mesh.size(mesh.ndim() - 1);
  WholeParameter parameter{.name = name, .tensor = tensor};
  parameter.cut_before = cut_before(name, tensor, options, spmd_mesh);
  if (!asked) {
    parameter.counts = balanced_rows(parameter, options, ranks);
    check_cut_before(parameter, mesh, options);
    return {std::move(mesh), std::move(parameter)};
  }
  check_mesh(mesh);
  const auto who =
      lockstep::str("[lockstep/fsdp] rank ", mesh.get_rank(), ": parameter '", name, "' of sizes ", tensor.sizes());
  const auto dim = asked->dim < 0 ? asked->dim + tensor.dim() : asked->dim;
  TORCH_CHECK(dim >= 0 && dim < tensor.dim(), who, " has no dim ", asked->dim, " to be cut along.");
  TORCH_CHECK(dim == 0 || tensor.size(dim) % ranks == 0, who, ": dim ", dim, " does not divide evenly by ", ranks,
              " ranks, which only dim 0 need not do.");
  const bool is_other = !(mesh == *options.mesh);
  TORCH_CHECK(!is_other || mesh.get_group(mesh.ndim() - 1) != options.mesh->get_group(options.mesh->ndim() - 1), who,
              ": its mesh is another object over the unit's own group. Give it the unit's mesh.");
  const auto& rows = asked->rows;
  const bool is_division = static_cast<int64_t>(rows.size()) == ranks &&
                           std::all_of(rows.begin(), rows.end(), [](int64_t count) { return count >= 0; }) &&
                           std::accumulate(rows.begin(), rows.end(), int64_t{0}) == tensor.size(0);
  TORCH_CHECK(rows.empty() || (dim == 0 && is_division), who, ": rows of ", join(rows, " + "), " along dim ", dim,
              " were given, and dim 0 has ", tensor.size(0), " for ", ranks, " ranks. Give a number for each.");
  parameter.dim = dim;
  parameter.counts = rows.empty() && dim == 0 && !is_other ? balanced_rows(parameter, options, ranks) : rows;
  check_cut_before(parameter, mesh, options);
  return {std::move(mesh), std::move(parameter)};
}

/// Ranks that cut differently would gather each other's rows.
void check_same_placements(const std::vector<std::pair<DeviceMesh, WholeParameter>>& parameters,
                           const FullyShardOptions& options) {
  if (!options.shard_placement_fn && !options.balance) return;
  Facts facts;
  for (const auto& [mesh, parameter] : parameters) {
    facts.emplace_back(str("parameter '", parameter.name, "'"),
                       str("dim ", parameter.dim, ", rows ", join(parameter.counts, " + ")));
  }
  check_same_on_all_ranks("where FSDP cuts parameters", facts, options.mesh->get_group(options.mesh->ndim() - 1));
}

void check_dtypes(const std::vector<std::pair<DeviceMesh, WholeParameter>>& parameters,
                  const FullyShardOptions& options, int rank) {
  std::map<std::string, std::vector<std::string>> kinds;  // names by what they have in common
  for (const auto& [mesh, parameter] : parameters) {
    const auto dtype = c10::toString(parameter.tensor.scalar_type());
    if (!options.use_orig_params) {
      TORCH_CHECK(at::isFloatingType(parameter.tensor.scalar_type()) && parameter.dim == 0 &&
                      parameter.counts.empty() && mesh == *options.mesh,
                  "[lockstep/fsdp] rank ", rank, ": parameter '", parameter.name, "' is ", dtype,
                  " or placed on its own, and a flat parameter holds floating point ones, in one row. Set ",
                  "use_orig_params.");
      kinds[str(dtype, parameter.tensor.requires_grad() ? ", trainable" : ", frozen")].push_back(parameter.name);
    } else if (parameter.tensor.requires_grad()) {
      kinds[dtype].push_back(parameter.name);
    }
  }
  if (kinds.size() <= 1) return;
  std::vector<std::string> sets;
  for (const auto& [kind, names] : kinds) sets.push_back(str(kind, ": ", join(names, ", ")));
  TORCH_CHECK(false, "[lockstep/fsdp] rank ", rank, ": ",
              options.use_orig_params
                  ? "trainable parameters of one unit have one dtype"
                  : "parameters of one flat parameter have one dtype, and all are trainable or none",
              ", and these are ", join(sets, "; "), ". Make some of the modules a unit of their own.");
}

/// What only the register holds a forward can only read from there, where its shard is from now on.
void check_held(const std::vector<std::pair<DeviceMesh, WholeParameter>>& parameters, int rank) {
  for (const auto& [mesh, parameter] : parameters) {
    // The register and this list.
    TORCH_CHECK(
        parameter.tensor.use_count() > 2 || mesh.size() == 1, "[lockstep/fsdp] rank ", rank, ": parameter '",
        parameter.name, "' is held by its module's register only, so a forward would read its shard. Keep what ",
        "register_parameter() returns in a member, and compute with that; to tie parameters use ", "tie_parameter().");
  }
}

/// Other tensors on the memory of parameters keep it, as it is now.
void warn_of_views(const std::vector<std::pair<DeviceMesh, WholeParameter>>& parameters, int rank) {
  std::unordered_map<const void*, std::size_t> holders;
  for (const auto& [mesh, parameter] : parameters) ++holders[parameter.tensor.storage().unsafeGetStorageImpl()];
  for (const auto& [mesh, parameter] : parameters) {
    const auto& storage = parameter.tensor.storage();
    if (parameter.tensor.numel() == 0 || storage.use_count() <= holders[storage.unsafeGetStorageImpl()]) continue;
    TORCH_WARN(
        "[lockstep/fsdp] rank ", rank, ": parameter '", parameter.name, "' shares its memory with another tensor, ",
        "a view of it or what it is a view of, which keeps the values of now: it does not see later steps. Make ",
        "views where they are used, in forward.");
  }
}

}  // namespace

FullyShardOptions completed(FullyShardOptions options, const torch::nn::Module& module) {
  TORCH_CHECK(options.mesh || !options.dp_mesh_dims,
              "[lockstep/fsdp] dp_mesh_dims without a mesh. Give the mesh that the parameters are on.");
  if (!options.mesh) {
    const auto parameters = module.parameters();
    auto kind = parameters.empty() || parameters.front().is_meta() ? at::kCPU : parameters.front().device().type();
    if (options.device_id) kind = options.device_id->type();
    options.mesh = DeviceMesh::from_group(default_group(), c10::DeviceTypeName(kind, /*lower_case=*/true));
  }
  if (options.dp_mesh_dims) options.mesh = data_parallel_mesh(*options.mesh, *options.dp_mesh_dims);
  check_mesh(*options.mesh);
  TORCH_CHECK(options.ignored_params.empty() || options.ignored_modules.empty(),
              "[lockstep/fsdp] both ignored_params and ignored_modules were given: give one of them.");
  for (const auto& module : options.ignored_modules) {
    TORCH_CHECK(module, "[lockstep/fsdp] ignored_modules holds a null pointer.");
    TORCH_CHECK(!find_unit(*module), "[lockstep/fsdp] ", module->name(), " is to be ignored and sharded already.");
  }
  if (options.sharding_strategy) apply_strategy(options);
  TORCH_CHECK(
      !options.keep_parts || (options.reshard_after_forward && options.reshard_after_forward->is_count()),
      "[lockstep/fsdp] keep_parts without a number in reshard_after_forward: say how many neighbours keep them.");
  const auto ranks = options.mesh->size(options.mesh->ndim() - 1);
  if (options.reshard_after_forward && options.reshard_after_forward->is_count()) {
    const auto count = options.reshard_after_forward->ranks();
    TORCH_CHECK(count >= 1 && ranks % count == 0, "[lockstep/fsdp] reshard_after_forward = ", count,
                " does not divide the ", ranks, " ranks that shard.");
    if (count == 1) {
      TORCH_WARN_ONCE("[lockstep/fsdp] reshard_after_forward = 1 is false: units stay whole.");
    }
    if (count == ranks && count > 1) options.reshard_after_forward = true;
  }
  if (options.mesh->size() == 1 && !options.force_sharding) {
    TORCH_WARN_ONCE("[lockstep/fsdp] one rank: nothing is divided, and units are not gathered.");
  }
  if (options.offload_policy && options.mesh->device_type() == "cpu") {
    TORCH_WARN_ONCE("[lockstep/fsdp] offload_policy has no effect: shards of a mesh of CPUs are on the host anyway.");
  }
  return options;
}

Below below(const std::vector<std::shared_ptr<torch::nn::Module>>& modules, const FullyShardOptions& options) {
  Below found;
  std::unordered_set<const void*> seen;
  for (const auto& module : options.ignored_modules) {
    seen.insert(module.get());
    for (const auto& each : module->modules(/*include_self=*/false)) seen.insert(each.get());
  }
  for (const auto& module : modules) {
    if (seen.contains(module.get())) {
      TORCH_WARN("[lockstep/fsdp] ", module->name(), " is to be sharded and ignored: it is ignored.");
    }
    // Names tell apart what several modules hold.
    collect(modules.size() > 1 ? module->name() : "", *module, seen, found);
  }
  return found;
}

void prepare(const Below& below, const FullyShardOptions& options) {
  const auto device = device_of(options);
  fill_unmaterialised(below, options, device);
  for_each_state(below, options, [&](const std::string& name, const at::Tensor& tensor, bool is_buffer) {
    place(tensor, device, name);
    const auto dtype = options.mp_policy.buffer_dtype;
    if (is_buffer && dtype && at::isFloatingType(tensor.scalar_type()) && tensor.scalar_type() != *dtype) {
      set_original_dtype(tensor, tensor.scalar_type());
      tensor.set_data(tensor.detach().to(*dtype));
    }
  });
  if (options.sync_module_states) send_states(below, options);
}

std::vector<std::pair<DeviceMesh, WholeParameter>> parameters_in(const Below& below, const FullyShardOptions& options,
                                                                 const std::optional<DeviceMesh>& spmd_mesh) {
  const auto rank = options.mesh->get_rank();
  std::vector<std::pair<DeviceMesh, WholeParameter>> parameters;
  for_each_state(below, options, [&](const std::string& name, const at::Tensor& tensor, bool is_buffer) {
    if (is_buffer) return;
    check_parameter(name, tensor, rank);
    const auto sharer = sharer_of(tensor);
    TORCH_CHECK(
        !sharer, "[lockstep/fsdp] rank ", rank, ": parameters '", sharer.value_or(""), "' and '", name,
        "' share memory and are two tensors, which would part when they are cut. Make them one: ", "tie_parameter().");
    remember_memory(name, tensor);
    parameters.push_back(placed(name, tensor, options, spmd_mesh));
  });
  check_same_placements(parameters, options);
  check_dtypes(parameters, options, rank);
  check_held(parameters, rank);
  warn_of_views(parameters, rank);
  return parameters;
}

void put_shards(const Below& below, Unit& unit) {
  struct Place {
    at::Tensor shard;
    std::size_t handle;
  };
  std::unordered_map<const void*, Place> places;
  for (const auto& group : unit.groups()) {
    for (const auto& member : group->members()) {
      for (std::size_t i = 0; i < member.handles.size(); ++i) {
        places.emplace(member.handles[i].tensor().unsafeGetTensorImpl(), Place{member.shard, i});
      }
    }
  }
  const bool is_flat = !unit.options().use_orig_params && !places.empty();
  std::vector<FlatName> names;
  for (const auto& [prefix, module] : below.modules) {
    auto& registered = ModuleAccess::parameters_of(*module);
    std::vector<std::string> replaced;
    for (auto& item : registered) {
      const auto found = places.find(item.value().unsafeGetTensorImpl());
      if (found == places.end()) continue;
      if (is_flat) {
        replaced.push_back(item.key());
        names.push_back({joined_name(prefix, item.key()), module->weak_from_this(), item.key(), found->second.handle});
      } else {
        item.value() = found->second.shard;
      }
    }
    for (const auto& name : replaced) registered.erase(name);
  }
  if (is_flat) {
    const auto& flat = places.begin()->second.shard;
    ModuleAccess::parameters_of(*below.modules.front().second).insert(kFlatName, flat);
  }
  unit.set_flat_names(std::move(names));
}

GroupPtr group_between(const FullyShardOptions& options) {
  const auto& reshard = options.reshard_after_forward;
  if (!reshard || reshard->ranks() <= 1) return nullptr;
  // By the group that is cut and the size; units keep the groups alive.
  using Made = std::map<std::pair<const void*, int>, c10::weak_intrusive_ptr<c10d::ProcessGroup>>;
  static auto* made = new Made;         // groups may outlive what is destroyed at exit
  static auto* mutex = new std::mutex;  // guards made
  const auto key = std::pair(options.mesh->get_group(options.mesh->ndim() - 1).get(), reshard->ranks());
  {
    const std::lock_guard lock(*mutex);
    if (const auto found = made->find(key); found != made->end()) {
      if (auto group = found->second.lock()) return group;
    }
  }
  const auto size = options.mesh->size();
  const auto mesh = DeviceMesh::from_ranks(options.mesh->device_type(),
                                           {options.mesh->ranks(), {size / reshard->ranks(), reshard->ranks()}});
  const auto group = mesh.get_group(1);
  const std::lock_guard lock(*mutex);
  made->insert_or_assign(key, c10::weak_intrusive_ptr<c10d::ProcessGroup>(group));
  return group;
}

}  // namespace lockstep::detail
