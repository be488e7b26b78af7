#include "lockstep/ddp/convert_sync_batchnorm.h"

#include <c10/util/Exception.h>
#include <c10/util/Type.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include <map>
#include <set>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

#include "lockstep/base/str.h"
#include "lockstep/ddp/sync_batch_norm.h"
#include "lockstep/nn/module_tensors.h"

namespace lockstep {
namespace {

using torch::nn::Module;
using ModulePtr = std::shared_ptr<Module>;

/// A BatchNorm where it is registered.
struct Found {
  Module* parent;
  std::string name;
  std::string path;
  ModulePtr layer;
};

struct Survey {
  std::vector<Found> batch_norms;
  std::vector<SyncBatchNormImpl*> synced;
};

bool is_batch_norm(const Module& module) {
  return module.as<torch::nn::BatchNorm1dImpl>() != nullptr || module.as<torch::nn::BatchNorm2dImpl>() != nullptr ||
         module.as<torch::nn::BatchNorm3dImpl>() != nullptr;
}

void survey(Module& parent, const std::string& prefix, std::set<const Module*>& seen, Survey& result) {
  if (!seen.insert(&parent).second) return;
  if (auto* synced = parent.as<SyncBatchNormImpl>()) result.synced.push_back(synced);
  for (const auto& child : parent.named_children()) {
    const auto path = detail::joined_name(prefix, child.key());
    if (is_batch_norm(*child.value())) {
      result.batch_norms.push_back({&parent, child.key(), path, child.value()});
    } else {
      survey(*child.value(), path, seen, result);
    }
  }
}

/// Where a container keeps its modules apart from the registry of its children. Calls visit(slot) for those that hold
/// `layer`, a slot being something a SyncBatchNorm can be assigned to.
template <class Visit>
void visit_slots(Module& parent, const Module* layer, const Visit& visit) {
  if (auto* sequential = parent.as<torch::nn::SequentialImpl>()) {
    for (auto& each : *sequential) {
      if (each.ptr().get() == layer) visit(each);
    }
  } else if (auto* list = parent.as<torch::nn::ModuleListImpl>()) {
    for (auto& each : *list) {
      if (each.get() == layer) visit(each);
    }
  } else if (auto* dict = parent.as<torch::nn::ModuleDictImpl>()) {
    for (auto& each : *dict) {
      if (each.value().get() == layer) visit(each.value());
    }
  }
}

template <class Layer>
std::shared_ptr<SyncBatchNormImpl> synced_like(const Layer& layer, const GroupPtr& group) {
  auto synced = std::make_shared<SyncBatchNormImpl>(
      layer.options, group,
      BatchNormTensors{layer.weight, layer.bias, layer.running_mean, layer.running_var, layer.num_batches_tracked});
  synced->train(layer.is_training());
  return synced;
}

std::shared_ptr<SyncBatchNormImpl> converted(const Module& layer, const GroupPtr& group) {
  if (const auto* one = layer.as<torch::nn::BatchNorm1dImpl>()) return synced_like(*one, group);
  if (const auto* two = layer.as<torch::nn::BatchNorm2dImpl>()) return synced_like(*two, group);
  return synced_like(*layer.as<torch::nn::BatchNorm3dImpl>(), group);
}

bool is_derived(const Module& layer) {
  const auto& type = typeid(layer);
  return type != typeid(torch::nn::BatchNorm1dImpl) && type != typeid(torch::nn::BatchNorm2dImpl) &&
         type != typeid(torch::nn::BatchNorm3dImpl);
}

void check_is_plain(const Module& layer, const std::string& path) {
  TORCH_CHECK(!is_derived(layer), "[lockstep/ddp] convert_sync_batchnorm: '", path, "' is a ",
              c10::demangle(typeid(layer).name()),
              ", which is derived from BatchNorm: what it adds would be lost. Put ",
              "a lockstep::SyncBatchNorm in its place.");
}

void check_can_be_replaced(const std::vector<Found>& batch_norms) {
  std::vector<std::string> members;
  for (const auto& found : batch_norms) {
    check_is_plain(*found.layer, found.path);
    bool has_slot = false;
    visit_slots(*found.parent, found.layer.get(), [&](auto& /*slot*/) { has_slot = true; });
    if (!has_slot) members.push_back(str("'", found.path, "'"));
  }
  TORCH_CHECK(members.empty(), "[lockstep/ddp] convert_sync_batchnorm: ", join(members, ", "),
              members.size() == 1 ? " is a member of its module's class" : " are members of their modules' classes",
              ", which would go on calling the BatchNorm it holds. Declare it as lockstep::SyncBatchNorm there ",
              "(evaluation and worlds of one rank compute the same), or keep it in a Sequential, ModuleList or ",
              "ModuleDict.");
}

/// What holds a layer by name is known; who else does will go on with the layer as it was.
void warn_of_other_holders(const std::vector<Found>& batch_norms) {
  std::map<const Module*, long> known;  // the type of use_count()
  std::set<std::pair<const Module*, const Module*>> counted;
  for (const auto& found : batch_norms) {
    auto& count = known[found.layer.get()];
    count += 2;  // this record, and the registry
    if (!counted.emplace(found.parent, found.layer.get()).second) continue;
    visit_slots(*found.parent, found.layer.get(), [&](auto& /*slot*/) { ++count; });
  }
  std::set<std::string> held;
  for (const auto& found : batch_norms) {
    if (found.layer.use_count() > known[found.layer.get()]) held.insert(str("'", found.path, "'"));
  }
  if (held.empty()) return;
  TORCH_WARN("[lockstep/ddp] convert_sync_batchnorm: somebody else holds ", join(held, ", "),
             " too, and what they call ",
             "stays a BatchNorm over their own batch. A member of a class is to be a lockstep::SyncBatchNorm.");
}

void replace(const Found& found, const std::shared_ptr<SyncBatchNormImpl>& synced) {
  visit_slots(*found.parent, found.layer.get(), [&](auto& slot) { slot = synced; });
  found.parent->replace_module(found.name, synced);
}

}  // namespace

void convert_sync_batchnorm(Module& module, const GroupPtr& process_group) {
  TORCH_CHECK(!is_batch_norm(module), "[lockstep/ddp] convert_sync_batchnorm: the module is a BatchNorm itself. Give ",
              "the shared_ptr to it, and take the layer that is returned.");
  Survey result;
  std::set<const Module*> seen;
  survey(module, "", seen, result);
  check_can_be_replaced(result.batch_norms);
  warn_of_other_holders(result.batch_norms);
  for (auto* synced : result.synced) synced->process_group = process_group;
  // One that is registered in several places stays one.
  std::map<const Module*, std::shared_ptr<SyncBatchNormImpl>> replacements;
  for (const auto& found : result.batch_norms) {
    auto& synced = replacements[found.layer.get()];
    if (!synced) synced = converted(*found.layer, process_group);
    replace(found, synced);
  }
}

ModulePtr convert_sync_batchnorm(const ModulePtr& module, const GroupPtr& process_group) {
  TORCH_CHECK(module, "[lockstep/ddp] convert_sync_batchnorm was given no module");
  if (!is_batch_norm(*module)) {
    convert_sync_batchnorm(*module, process_group);
    return module;
  }
  check_is_plain(*module, module->name());
  return converted(*module, process_group);
}

}  // namespace lockstep
