#include "lockstep/ddp/module_checks.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <map>
#include <set>

#include "lockstep/base/str.h"
#include "lockstep/ddp/sync_batch_norm.h"
#include "lockstep/shard/layout_of.h"

namespace lockstep::detail {
namespace {

std::set<std::string> devices_of(const NamedTensors& tensors) {
  std::set<std::string> devices;
  for (const auto& [name, tensor] : tensors) devices.insert(tensor.device().str());
  return devices;
}

void check_devices(const DdpOptions& options, const NamedTensors& all, const ModuleTraits& traits) {
  const auto devices = join(devices_of(all), ", ");
  const bool takes_device_ids = !traits.device.is_cpu() && !traits.is_multi_device;
  const bool has_device_ids = options.device_ids && !options.device_ids->empty();
  TORCH_CHECK(!has_device_ids || options.device_ids->size() == 1, "[lockstep/ddp] device_ids can only be unset or ",
              "hold the module's one device, but is [", device_ids_text(options), "] and the parameters are on ",
              devices);
  TORCH_CHECK(takes_device_ids || (!has_device_ids && !options.output_device),
              "[lockstep/ddp] device_ids and output_device are for modules on one accelerator, but got device_ids [",
              has_device_ids ? device_ids_text(options) : "", "], output_device ",
              options.output_device ? std::to_string(*options.output_device) : "none", " and parameters on ", devices);
  TORCH_CHECK(!has_device_ids || options.device_ids->front() == traits.device.index(), "[lockstep/ddp] device_ids is [",
              device_ids_text(options), "], but the parameters are on ", devices, ": move the module first");
}

}  // namespace

std::string device_ids_text(const DdpOptions& options) {
  std::vector<int> ids;  // device indices print as characters
  if (options.device_ids) ids.assign(options.device_ids->begin(), options.device_ids->end());
  return join(ids, ", ");
}

ModuleTraits check_module(const torch::nn::Module& module, const DdpOptions& options, const NamedTensors& all,
                          const NamedTensors& reduced, bool has_managed, const GroupPtr& group) {
  const auto& trigger = options.param_to_hook_all_reduce;
  TORCH_CHECK(!trigger.defined() ||
                  std::any_of(all.begin(), all.end(), [&](const auto& each) { return each.second.is_same(trigger); }),
              "[lockstep/ddp] param_to_hook_all_reduce is no parameter of the module");
  TORCH_CHECK(has_managed || !options.delay_all_reduce_named_params.empty(),
              "[lockstep/ddp] the module has no parameter that requires a gradient: DistributedDataParallel is not "
              "needed. (Ignored and frozen parameters do not count.)");
  for (const auto& [name, tensor] : reduced) {
    TORCH_CHECK(!tensor.requires_grad() || tensor.sizes() != at::IntArrayRef({0}), "[lockstep/ddp] parameter '", name,
                "' has no shape yet. Run a forward pass that gives it one before you wrap the module.");
  }
  for (const auto& [name, tensor] : all) {
    const auto cut = layout_of(tensor);
    TORCH_CHECK(!has_gathered_layout(tensor) || cut->is_replicated(), "[lockstep/ddp] parameter '", name,
                "' is a shard (", *cut, "), and every rank has another one: they cannot be averaged. Sharded modules ",
                "reduce their gradients themselves; leave DistributedDataParallel out.");
    TORCH_CHECK(!cut || has_gathered_layout(tensor) || cut->is_same_on(global_ranks(group)),
                "[lockstep/ddp] parameter '", name, "' is a part (", *cut,
                "), and not all ranks of the process group have the same one: they cannot be ",
                "averaged. Give the group of the axis for data: {.process_group = mesh.get_group(\"dp\")}.");
  }
  std::set<std::string> types;
  for (const auto& [name, tensor] : all) types.insert(c10::DeviceTypeName(tensor.device().type(), true));
  TORCH_CHECK(types.size() == 1, "[lockstep/ddp] the module's parameters must be on one type of device, but are on ",
              join(types, ", "));
  TORCH_CHECK(!all[0].second.is_meta(), "[lockstep/ddp] parameter '", all[0].first,
              "' has no memory yet (device meta). Give it some before you wrap the module: materialize_module(), after "
              "a deferred_init.");
  ModuleTraits traits;
  traits.device = all[0].second.device();
  traits.is_multi_device = devices_of(all).size() > 1;
  check_devices(options, all, traits);
  for_each_module(module, [&](const std::string& name, const torch::nn::Module& part) {
    if (dynamic_cast<const SyncBatchNormImpl*>(&part) == nullptr) return;
    TORCH_CHECK(!traits.device.is_cpu(), "[lockstep/ddp] layer '", name,
                "' is a SyncBatchNorm, which works in modules on an accelerator only");
    if (traits.sync_batch_norm.empty()) traits.sync_batch_norm = name;
  });
  return traits;
}

std::string changes_since(const ManagedParameters& before, const ManagedParameters& now) {
  std::vector<std::string> problems;
  std::map<std::string, std::size_t> left;
  for (std::size_t i = 0; i < before.infos.size(); ++i) left[before.infos[i].name] = i;
  for (std::size_t i = 0; i < now.infos.size(); ++i) {
    const auto& info = now.infos[i];
    const auto found = left.find(info.name);
    if (found == left.end()) {
      problems.push_back(str("'", info.name, "' was added or has begun to require gradients"));
      continue;
    }
    const auto& was = before.infos[found->second];
    const auto& tensor = before.tensors[found->second];
    if (!now.tensors[i].is_same(tensor)) {
      problems.push_back(str("'", info.name, "' was replaced by another tensor"));
    } else if (was.device != info.device || was.dtype != info.dtype || was.sizes != info.sizes) {
      problems.push_back(str(was.describe(), " on ", tensor.device().str(), " was changed or moved"));
    }
    left.erase(found);
  }
  for (const auto& [name, index] : left) {
    problems.push_back(str("'", name, "' was removed, or does not require gradients any more"));
  }
  return join(problems, "; ");
}

std::string names_of_new(const ManagedParameters& before, const ManagedParameters& now) {
  std::set<const c10::TensorImpl*> known;
  for (const auto& tensor : before.tensors) known.insert(tensor.unsafeGetTensorImpl());
  std::vector<std::string> names;
  for (std::size_t i = 0; i < now.tensors.size(); ++i) {
    if (!known.contains(now.tensors[i].unsafeGetTensorImpl())) names.push_back(str("'", now.infos[i].name, "'"));
  }
  return join(names, ", ");
}

std::string common_problem(const std::vector<std::string>& problems) {
  std::string text;
  for (std::size_t rank = 0; rank < problems.size(); ++rank) {
    if (problems[rank].empty() || problems[rank] == problems[0]) continue;
    text += str(text.empty() ? "" : "\n", "on rank ", rank, ": ", problems[rank]);
  }
  if (text.empty()) return problems[0];
  return str("[lockstep/ddp] the ranks cannot go on with DistributedDataParallel",
             problems[0].empty() ? "" : "; on rank 0: ", problems[0], problems[0].empty() ? "; " : "\n", text);
}

Facts shared_facts(const DdpOptions& options, bool has_forward_buffers) {
  const auto text = [](bool value) { return value ? "true" : "false"; };
  return {{"bucket_cap_mb", options.bucket_cap_mb ? str(*options.bucket_cap_mb) : "not set"},
          {"bucket_cap_mb_list", str("[", join(options.bucket_cap_mb_list, ", "), "]")},
          {"find_unused_parameters", text(options.find_unused_parameters)},
          {"static_graph", text(options.static_graph)},
          {"skip_all_reduce_unused_params", text(options.skip_all_reduce_unused_params)},
          {"per_parameter", text(options.per_parameter)},
          {"recoverable", text(options.recoverable)},
          {"mixed_precision", describe(options.mixed_precision.value_or(MixedPrecision{}))},
          {"number of delayed parameters", std::to_string(options.delay_all_reduce_named_params.size())},
          {"buffers synced before forward", text(has_forward_buffers)}};
}

}  // namespace lockstep::detail
