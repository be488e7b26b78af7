// Which rank has which parameter, when whole parameters are divided. Computed when it is asked for, kept, and forgotten
// all at once when the groups change. Parameters are told apart by identity. For one thread.
#pragma once

#include <torch/optim/optimizer.h>

#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace lockstep {

/// By rank, the parameter groups it updates: as many for each rank, some maybe empty, with the options of the whole
/// group.
using RankGroups = std::vector<std::vector<torch::optim::OptimizerParamGroup>>;

class PartitionCache {
 public:
  /// Divides the groups of `optimizer`, which it refers to. `who` opens messages.
  PartitionCache(const torch::optim::Optimizer& optimizer, int world_size, std::string who);

  /// Python's sorted greedy partition, or the given one.
  const RankGroups& partition();
  /// Takes this partition. Throws if there is one already, if there are several groups, if there is not one list for
  /// each rank, and if a parameter is not in the group or is listed twice.
  const RankGroups& partition(const std::vector<std::vector<at::Tensor>>& params_per_rank);

  /// Parameters that belong to no rank are absent.
  const std::unordered_map<const void*, int>& param_to_rank();
  /// Positions over the groups, in their order; keys are TensorImpls.
  const std::unordered_map<const void*, int64_t>& param_to_index();
  const std::vector<at::Tensor>& index_to_param();
  /// For every device, in order of appearance, its parameters by rank.
  const std::vector<std::pair<c10::Device, std::vector<std::vector<at::Tensor>>>>& device_to_params_per_rank();

  void clear();

 private:
  struct Caches {
    std::optional<RankGroups> partition;
    std::optional<std::unordered_map<const void*, int>> param_to_rank;
    std::optional<std::unordered_map<const void*, int64_t>> param_to_index;
    std::optional<std::vector<at::Tensor>> index_to_param;
    std::optional<std::vector<std::pair<c10::Device, std::vector<std::vector<at::Tensor>>>>> device_to_params;
  };

  const torch::optim::Optimizer& optimizer_;
  const int world_size_;
  const std::string who_;
  Caches caches_;
};

}  // namespace lockstep
