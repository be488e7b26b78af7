// Clipping by one norm of what several optimizers step, or of lists of parameters that are divided differently.
#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <unordered_set>

#include "lockstep/comm/world.h"
#include "lockstep/optim/clip_grad.h"
#include "lockstep/shard/layout_of.h"
#include "lockstep/state/optimizer_state.h"

namespace lockstep {
namespace {

/// Shards of one norm: those with the same groups become one, so that ranks sum once for each, and a gradient that
/// comes several times counts once.
class Together {
 public:
  void add(GradientShard shard) {
    auto found =
        std::find_if(all_.begin(), all_.end(), [&](const GradientShard& each) { return each.groups == shard.groups; });
    if (found == all_.end()) found = all_.insert(found, GradientShard{.groups = shard.groups});
    for (auto& gradient : shard.gradients) {
      if (seen_.insert(gradient.unsafeGetTensorImpl()).second) found->gradients.push_back(std::move(gradient));
    }
  }
  void add(std::vector<GradientShard> shards) {
    for (auto& shard : shards) add(std::move(shard));
  }

  const std::vector<GradientShard>& all() const { return all_; }
  std::vector<at::Tensor> gradients() const {
    std::vector<at::Tensor> gradients;
    for (const auto& shard : all_) gradients.insert(gradients.end(), shard.gradients.begin(), shard.gradients.end());
    return gradients;
  }

 private:
  std::vector<GradientShard> all_;
  std::unordered_set<const void*> seen_;
};

/// In .grad, whole or not. Throws if ranks could not sum them now.
std::vector<GradientShard> shards_in_grad(const std::vector<at::Tensor>& parameters) {
  Together shards;
  for (auto& shard : shards_by_layout(parameters)) {
    if (!shard.groups.empty()) {
      shards.add(std::move(shard));
      continue;
    }
    for (const auto& gradient : shard.gradients) {
      if (const auto* stand_in = GradientStandIn::of(gradient)) stand_in->check_can_be_summed();
    }
    shards.add(shards_of_gradients(shard.gradients));
  }
  return shards.all();
}

NormOptions for_parameters(NormOptions options, const std::vector<at::Tensor>& parameters) {
  if (!options.result_dtype) options.result_dtype = norm_dtype_of(parameters);
  if (!parameters.empty()) options.device = parameters.front().device();
  return options;
}

at::Tensor clip_by_one_norm(const Together& for_norm, const std::vector<at::Tensor>& to_scale, double max_norm,
                            const NormOptions& options) {
  const auto norm = get_total_norm_of_shards(for_norm.all(), options);
  scale_to_norm_(to_scale, max_norm, norm, options.foreach);
  return norm;
}

void check_list(const ParameterShard& list) {
  for (const auto& group : list.groups) check_member(group);
  if (list.groups.empty()) return;
  for (const auto& parameter : list.parameters) {
    const auto layout = layout_of(parameter);
    const bool knows_its_groups = (layout && !layout->is_replicated()) || GradientStandIn::of(parameter.grad());
    TORCH_CHECK(!knows_its_groups, "[lockstep/optim] some of these gradients are divided over groups of their own, ",
                "which are known. Leave ParameterShard::groups out for them.");
  }
}

}  // namespace

at::Tensor clip_grad_norm_(const OptimizerList& optimizers, double max_norm, const NormOptions& options) {
  std::vector<at::Tensor> parameters;
  Together for_norm;
  Together stepped;
  for (torch::optim::Optimizer& optimizer : optimizers) {
    const auto own = optimized_parameters(optimizer);
    parameters.insert(parameters.end(), own.begin(), own.end());
    if (auto* sharded = dynamic_cast<ShardedGradients*>(&optimizer)) {
      for_norm.add(sharded->gradients_for_norm());
      stepped.add(sharded->own_gradients());
    } else {
      const auto shards = shards_in_grad(own);
      for_norm.add(shards);
      stepped.add(shards);
    }
  }
  return clip_by_one_norm(for_norm, stepped.gradients(), max_norm, for_parameters(options, parameters));
}

at::Tensor clip_grad_norm_(const std::vector<ParameterShard>& lists, double max_norm, const NormOptions& options) {
  std::vector<at::Tensor> parameters;
  Together shards;
  for (const auto& list : lists) check_list(list);
  for (const auto& list : lists) {
    parameters.insert(parameters.end(), list.parameters.begin(), list.parameters.end());
    if (list.groups.empty()) {
      shards.add(shards_in_grad(list.parameters));
      continue;
    }
    GradientShard shard{.groups = list.groups};
    for (const auto& parameter : list.parameters) {
      // An empty part has no largest element.
      const auto& gradient = parameter.grad();
      if (gradient.defined() && gradient.numel() > 0) shard.gradients.push_back(gradient);
    }
    shards.add(std::move(shard));
  }
  return clip_by_one_norm(shards, shards.gradients(), max_norm, for_parameters(options, parameters));
}

void clip_grad_value_(const OptimizerList& optimizers, double clip_value, bool foreach) {
  for (torch::optim::Optimizer& optimizer : optimizers) clip_grad_value_(optimizer, clip_value, foreach);
}

}  // namespace lockstep
