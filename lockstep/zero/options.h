// The settings of ZeroRedundancyOptimizer, with Python's names and defaults. The same on all ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/zero/partition.h"

namespace lockstep {

class DdpBase;
class DdpEngine;

/// What is divided among the ranks. Parameters end up the same in all stages.
enum class ZeroStage {
  /// Nothing: every rank steps everything, as plain optimizers do under DDP.
  kReplicated = 0,
  /// Optimizer state and the work of the step.
  kState = 1,
  /// Gradients too: every rank keeps its shard of their average, and DDP frees the rest while backward runs. Needs
  /// `ddp`; after its backwards .grad stands for a gradient that is divided, as long as the optimizer lives.
  kGradients = 2,
};

/// A DistributedDataParallel of any module, which is not kept alive.
class DdpReference {
 public:
  DdpReference() = default;
  DdpReference(const DdpBase& ddp);  // NOLINT: meant to be implicit

  std::shared_ptr<DdpEngine> engine() const { return engine_.lock(); }

 private:
  std::weak_ptr<DdpEngine> engine_;
};

struct ZeroOptions {
  /// The ranks among which state is divided. Not given: the group of `ddp`, or of the DistributedDataParallel that
  /// averages the parameters, else the default group. Null is refused: it is what new_group() gives to ranks that are
  /// not in it.
  std::optional<GroupPtr> process_group = std::nullopt;
  /// One program goes from plain data parallelism to sharded gradients by this option.
  ZeroStage stage = ZeroStage::kState;
  /// The wrapper whose backwards compute the gradients.
  DdpReference ddp = {};
  /// Parameters become views of one flat tensor for each rank, which is sent whole. Costs no further memory once it is
  /// made, and no copy in a step.
  bool parameters_as_bucket_view = false;
  bool overlap_with_ddp = false;
  /// step() returns while parameters are on their way, in the order of the groups, and whoever touches one waits for
  /// it: the next forward runs meanwhile. The values are the same. What takes addresses, as torch::save() of the model
  /// does, throws before wait_for_parameters(); an address that was kept is not noticed. Not with overlap_with_ddp.
  bool overlap_parameter_sync = false;
  /// kElements divides evenly whatever the sizes are; for optimizers that treat every element alike. Parameters then
  /// become views of flat tensors. Not given: kElements with ZeroStage::kGradients, which needs it, else kParameters.
  std::optional<ZeroPartition> partition = std::nullopt;
  /// Parameters of less precision, such as at::kBFloat16 and at::kHalf, are stepped as masters of this dtype,
  /// at::kFloat or at::kDouble, of which every rank has those of its shard; they get the results rounded. Masters are
  /// part of the state, and follow parameters that are changed from outside. Not with overlap_with_ddp.
  std::optional<at::ScalarType> master_dtype = std::nullopt;
  /// ZeroStage::kGradients only, where the optimizer reduces gradients: in this dtype instead of their parameters', as
  /// MixedPrecision::reduce_dtype does for what DDP reduces. Sums are rounded to the parameters' dtype, as in .grad, or
  /// kept as they are for masters.
  std::optional<at::ScalarType> reduce_dtype = std::nullopt;
  /// Instead of a computed partition: for every rank its parameters. Some may be in no list; nobody updates those. One
  /// parameter group only.
  std::vector<std::vector<at::Tensor>> params_per_rank = {};
  /// What saves know the parameters by: a name for each, over all groups, in their order. Not given: those of `ddp`, or
  /// of the DistributedDataParallel that averages them. Saves without names know parameters by their position.
  std::vector<std::string> parameter_names = {};
  /// Before every step ranks compare count, shapes and dtypes of their parameters, group by group, and those that
  /// differ are named. One message per step; on as well if TORCH_DISTRIBUTED_DEBUG is.
  bool check_same_on_all_ranks = false;
};

}  // namespace lockstep
