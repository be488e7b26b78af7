// The settings of ZeroRedundancyOptimizer, with Python's names and defaults. The same on all ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/zero/partition.h"

namespace lockstep {

struct ZeroOptions {
  /// The ranks that share the state. Not given: the default group. Null, which new_group() gives to ranks that are not
  /// in the group, is refused.
  std::optional<GroupPtr> process_group = std::nullopt;
  /// Parameters become views of one flat tensor for each rank, which is sent whole. Costs no further memory once it is
  /// made, and no copy in a step.
  bool parameters_as_bucket_view = false;
  bool overlap_with_ddp = false;
  /// kElements divides evenly whatever the sizes are; for optimizers that treat every element alike. Parameters then
  /// become views of flat tensors.
  ZeroPartition partition = ZeroPartition::kParameters;
  /// Instead of a computed partition: for every rank its parameters. Some may be in no list; nobody updates those. One
  /// parameter group only.
  std::vector<std::vector<at::Tensor>> params_per_rank = {};
  /// Before every step ranks compare count, shapes and dtypes of their parameters, group by group, and those that
  /// differ are named. One message per step; on as well if TORCH_DISTRIBUTED_DEBUG is.
  bool check_same_on_all_ranks = false;
};

}  // namespace lockstep
