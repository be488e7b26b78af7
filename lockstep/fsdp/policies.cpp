#include "lockstep/fsdp/policies.h"

#include <torch/nn/module.h>
#include <torch/nn/modules/activation.h>

#include <unordered_set>

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
    if (is_new && !layout_of(parameter)) elements += parameter.numel();
  }
  return elements;
}

/// Post-order, so that inner units are there first.
void shard_below(torch::nn::Module& module, const std::string& name, const WrapPolicy& policy,
                 const FullyShardOptions& options, std::unordered_set<const void*>& seen) {
  if (!seen.insert(&module).second || detail::find_unit(module)) return;
  for (const auto& child : module.named_children()) {
    shard_below(*child.value(), detail::joined_name(name, child.key()), policy, options, seen);
  }
  if (name.empty() || !detail::can_be_called(module)) return;
  const auto answer = policy({.module = module, .name = name, .unwrapped_elements = unwrapped_elements_of(module)});
  if (answer.is_unit) fully_shard(module, answer.options.value_or(options));
}

}  // namespace

WrapPolicy always_wrap_policy() {
  return [](const PolicyQuestion&) { return PolicyAnswer(true); };
}

WrapPolicy size_based_wrap_policy(int64_t min_num_params) {
  return [min_num_params](const PolicyQuestion& question) {
    // Attention reads the weights of its output layer itself.
    const auto parent_is_attention = question.name.ends_with("out_proj");
    return PolicyAnswer(!parent_is_attention && question.unwrapped_elements >= min_num_params);
  };
}

FsdpUnit shard_by_policy(torch::nn::Module& root, const WrapPolicy& policy, const FullyShardOptions& options) {
  std::unordered_set<const void*> seen;
  shard_below(root, "", policy, options, seen);
  return fully_shard(root, options);
}

}  // namespace lockstep
