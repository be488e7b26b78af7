#include "lockstep/optim/sharded_gradients.h"

#include <algorithm>
#include <unordered_set>

#include "lockstep/shard/layout_of.h"

namespace lockstep {
namespace {

std::vector<GroupPtr> dividing_groups(const at::Tensor& parameter) {
  std::vector<GroupPtr> groups;
  const auto layout = layout_of(parameter);
  if (!layout) return groups;
  for (const auto axis : layout->dividing_axes()) groups.push_back(layout->mesh().get_group(axis));
  return groups;
}

}  // namespace

std::vector<GradientShard> shards_by_layout(const std::vector<at::Tensor>& parameters) {
  std::vector<GradientShard> shards(1);
  std::unordered_set<const void*> seen;
  for (const auto& parameter : parameters) {
    if (!seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
    auto groups = dividing_groups(parameter);
    auto found = std::find_if(shards.begin(), shards.end(), [&](const auto& each) { return each.groups == groups; });
    if (found == shards.end()) found = shards.insert(found, GradientShard{.groups = std::move(groups)});
    const auto& gradient = parameter.grad();
    // An empty part has no largest element.
    if (gradient.defined() && gradient.numel() > 0) found->gradients.push_back(gradient);
  }
  return shards;
}

std::vector<GradientShard> shards_of_gradients(const std::vector<at::Tensor>& gradients) {
  std::vector<GradientShard> shards(1);
  for (const auto& gradient : gradients) {
    const auto* stand_in = GradientStandIn::of(gradient);
    if (stand_in == nullptr) {
      shards.front().gradients.push_back(gradient);
      continue;
    }
    auto part = stand_in->shard();
    auto found = std::find_if(shards.begin() + 1, shards.end(),
                              [&](const GradientShard& each) { return each.groups == part.groups; });
    if (found == shards.end()) {
      shards.push_back(std::move(part));
    } else {
      found->gradients.insert(found->gradients.end(), part.gradients.begin(), part.gradients.end());
    }
  }
  return shards;
}

std::optional<at::ScalarType> norm_dtype_of(const std::vector<at::Tensor>& parameters) {
  std::optional<at::ScalarType> dtype;
  for (const auto& parameter : parameters) {
    if (!parameter.is_floating_point() && !parameter.is_complex()) continue;
    const auto own = c10::toRealValueType(parameter.scalar_type());
    dtype = dtype ? c10::promoteTypes(*dtype, own) : own;
  }
  return dtype;
}

}  // namespace lockstep
