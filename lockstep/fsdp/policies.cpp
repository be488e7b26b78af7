#include "lockstep/fsdp/policies.h"

#include <torch/nn/module.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>

#include <string>
#include <unordered_set>
#include <utility>

#include "lockstep/base/env.h"
#include "lockstep/comm/world.h"
#include "lockstep/fsdp/unit_registry.h"
#include "lockstep/nn/module_tensors.h"
#include "lockstep/shard/layout_of.h"

namespace lockstep {
namespace {

int64_t unwrapped_elements_of(const torch::nn::Module& module) {
  int64_t elements = 0;
  std::unordered_set<const void*> seen;
  for (const auto& parameter : module.parameters()) {
    const bool is_new = seen.insert(parameter.unsafeGetTensorImpl()).second;
    if (is_new && !has_gathered_layout(parameter)) elements += parameter.numel();
  }
  return elements;
}

/// Of a module that computes in full precision among others that do not.
FullyShardOptions in_full_precision(FullyShardOptions options) {
  options.mp_policy.output_dtype = options.mp_policy.param_dtype;
  options.mp_policy.param_dtype = at::kFloat;
  options.mp_policy.reduce_dtype = std::nullopt;
  return options;
}

/// Goes through a tree post-order, so that inner units are there first.
class PolicyWalk {
 public:
  PolicyWalk(const WrapPolicy& policy, const FullyShardOptions& options) : policy_(policy), options_(options) {
    for (const auto& module : options.ignored_modules) {
      for (const auto& each : module->modules()) seen_.insert(each.get());
    }
  }

  void shard_below(torch::nn::Module& module, const std::string& name, const torch::nn::Module* parent) {
    if (!seen_.insert(&module).second) return;
    for (const auto& child : module.named_children()) {
      shard_below(*child.value(), detail::joined_name(name, child.key()), &module);
    }
    if (parent == nullptr || !detail::can_be_called(module)) return;
    if (options_.mp_policy.param_dtype && options_.mp_policy.is_full_precision_module(module)) {
      TORCH_WARN_ONCE("[lockstep/fsdp] ", module.name(), " computes in full precision, as a unit of its own.");
      fully_shard(module, in_full_precision(options_));
      return;
    }
    const auto answer = policy_({module, parent, name, unwrapped_elements_of(module)});
    if (answer.is_unit) fully_shard(module, answer.options.value_or(options_));
  }

 private:
  const WrapPolicy& policy_;
  const FullyShardOptions& options_;
  std::unordered_set<const void*> seen_;
};

/// Shards within a host and replicates across hosts.
DeviceMesh mesh_of_hosts() {
  const auto ranks = static_cast<int64_t>(default_group()->getSize());
  const auto local = std::stoll(env("LOCAL_WORLD_SIZE").value_or(std::to_string(ranks)));
  return init_device_mesh("cpu", {ranks / local, local}, {.mesh_dim_names = {"replicate", "shard"}});
}

bool is_hybrid(const FullyShardOptions& options) {
  return options.sharding_strategy == ShardingStrategy::kHybridShard ||
         options.sharding_strategy == ShardingStrategy::kHybridShardZero2;
}

thread_local const FullyShardOptions* wrap_options = nullptr;

}  // namespace

bool is_batch_norm(const torch::nn::Module& module) {
  using namespace torch::nn;
  return dynamic_cast<const BatchNorm1dImpl*>(&module) != nullptr ||
         dynamic_cast<const BatchNorm2dImpl*>(&module) != nullptr ||
         dynamic_cast<const BatchNorm3dImpl*>(&module) != nullptr;
}

WrapPolicy always_wrap_policy() {
  return [](const PolicyQuestion&) { return PolicyAnswer(true); };
}

WrapPolicy size_based_wrap_policy(int64_t min_num_params) {
  return [min_num_params](const PolicyQuestion& question) {
    // Attention reads the weights of its output layer itself.
    const auto* attention = dynamic_cast<const torch::nn::MultiheadAttentionImpl*>(question.parent);
    return PolicyAnswer(attention == nullptr && question.unwrapped_elements >= min_num_params);
  };
}

FsdpUnit shard_by_policy(torch::nn::Module& root, const WrapPolicy& policy, const FullyShardOptions& options) {
  detail::for_each_module(root, [](const std::string& name, const torch::nn::Module& module) {
    TORCH_CHECK(!detail::find_unit(module), "[lockstep/fsdp] '", name.empty() ? module.name() : name,
                "' is sharded already: a policy picks all units ", "of a tree, or none.");
  });
  auto completed = options;
  if (is_hybrid(options) && !options.mesh) completed.mesh = mesh_of_hosts();
  PolicyWalk(policy, completed).shard_below(root, "", nullptr);
  return fully_shard(root, completed);
}

EnableWrap::EnableWrap(FullyShardOptions options) : options_(std::move(options)) {
  TORCH_CHECK(wrap_options == nullptr, "[lockstep/fsdp] EnableWrap inside of another one. One scope is enough.");
  wrap_options = &options_;
}

EnableWrap::~EnableWrap() {
  wrap_options = nullptr;
}

void detail::wrap_module(torch::nn::Module& module, const std::optional<FullyShardOptions>& options) {
  if (wrap_options != nullptr) fully_shard(module, options ? *options : *wrap_options);
}

}  // namespace lockstep
