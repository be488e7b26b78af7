#include "lockstep/zero/partition_cache.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <unordered_set>

#include "lockstep/zero/partition.h"

namespace lockstep {
namespace {

torch::optim::OptimizerParamGroup with_options_of(const torch::optim::OptimizerParamGroup& whole,
                                                  std::vector<at::Tensor> parameters) {
  if (!whole.has_options()) return {std::move(parameters)};
  return {std::move(parameters), whole.options().clone()};
}

}  // namespace

PartitionCache::PartitionCache(const torch::optim::Optimizer& optimizer, int world_size, std::string who)
    : optimizer_(optimizer), world_size_(world_size), who_(std::move(who)) {}

const RankGroups& PartitionCache::partition() {
  if (caches_.partition) return *caches_.partition;
  const auto& groups = optimizer_.param_groups();
  std::vector<std::vector<int64_t>> sizes;
  for (const auto& group : groups) {
    auto& of_group = sizes.emplace_back();
    for (const auto& parameter : group.params()) of_group.push_back(parameter.numel());
  }
  const auto positions = partition_by_size(sizes, world_size_);
  auto& result = caches_.partition.emplace();
  for (const auto& of_rank : positions) {
    auto& rank_groups = result.emplace_back();
    for (std::size_t i = 0; i < groups.size(); ++i) {
      std::vector<at::Tensor> parameters;
      for (const auto position : of_rank[i]) parameters.push_back(groups[i].params()[position]);
      rank_groups.push_back(with_options_of(groups[i], std::move(parameters)));
    }
  }
  return result;
}

const RankGroups& PartitionCache::partition(const std::vector<std::vector<at::Tensor>>& params_per_rank) {
  TORCH_CHECK(!caches_.partition, who_,
              ": params_per_rank was given after the parameters had been divided. Give it at construction.");
  TORCH_CHECK(optimizer_.param_groups().size() == 1, who_, ": params_per_rank needs one parameter group, there are ",
              optimizer_.param_groups().size());
  TORCH_CHECK(params_per_rank.size() == static_cast<std::size_t>(world_size_), who_, ": params_per_rank has ",
              params_per_rank.size(), " lists. It takes one for each of ", world_size_, " ranks.");
  const auto& group = optimizer_.param_groups().front();
  std::unordered_set<const void*> left;
  for (const auto& parameter : group.params()) left.insert(parameter.unsafeGetTensorImpl());
  const auto known = left;
  for (std::size_t rank = 0; rank < params_per_rank.size(); ++rank) {
    for (std::size_t i = 0; i < params_per_rank[rank].size(); ++i) {
      const void* parameter = params_per_rank[rank][i].unsafeGetTensorImpl();
      TORCH_CHECK(known.count(parameter) == 1, who_, ": params_per_rank[", rank, "][", i,
                  "] is none of the optimizer's parameters");
      TORCH_CHECK(left.erase(parameter) == 1, who_, ": params_per_rank[", rank, "][", i,
                  "] is listed twice. A parameter belongs to one rank.");
    }
  }
  auto& result = caches_.partition.emplace();
  for (const auto& parameters : params_per_rank) {
    result.emplace_back().push_back(with_options_of(group, parameters));
  }
  return result;
}

const std::unordered_map<const void*, int>& PartitionCache::param_to_rank() {
  if (!caches_.param_to_rank) {
    auto& ranks = caches_.param_to_rank.emplace();
    const auto& groups = partition();
    for (std::size_t rank = 0; rank < groups.size(); ++rank) {
      for (const auto& group : groups[rank]) {
        for (const auto& parameter : group.params()) {
          ranks.emplace(parameter.unsafeGetTensorImpl(), static_cast<int>(rank));
        }
      }
    }
  }
  return *caches_.param_to_rank;
}

const std::unordered_map<const void*, int64_t>& PartitionCache::param_to_index() {
  if (!caches_.param_to_index) {
    auto& indices = caches_.param_to_index.emplace();
    for (const auto& parameter : index_to_param()) {
      indices.emplace(parameter.unsafeGetTensorImpl(), static_cast<int64_t>(indices.size()));
    }
  }
  return *caches_.param_to_index;
}

const std::vector<at::Tensor>& PartitionCache::index_to_param() {
  if (!caches_.index_to_param) {
    auto& parameters = caches_.index_to_param.emplace();
    for (const auto& group : optimizer_.param_groups()) {
      parameters.insert(parameters.end(), group.params().begin(), group.params().end());
    }
  }
  return *caches_.index_to_param;
}

const std::vector<std::pair<c10::Device, std::vector<std::vector<at::Tensor>>>>&
PartitionCache::device_to_params_per_rank() {
  if (!caches_.device_to_params) {
    auto& devices = caches_.device_to_params.emplace();
    const auto& groups = partition();
    for (std::size_t rank = 0; rank < groups.size(); ++rank) {
      for (const auto& group : groups[rank]) {
        for (const auto& parameter : group.params()) {
          auto found = std::find_if(devices.begin(), devices.end(),
                                    [&](const auto& each) { return each.first == parameter.device(); });
          if (found == devices.end()) {
            found = devices.insert(devices.end(), {parameter.device(), {}});
            found->second.resize(world_size_);
          }
          found->second[rank].push_back(parameter);
        }
      }
    }
  }
  return *caches_.device_to_params;
}

void PartitionCache::clear() {
  caches_ = {};
}

}  // namespace lockstep
