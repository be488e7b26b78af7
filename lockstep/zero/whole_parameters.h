// Sharding by whole parameters: every parameter belongs to one rank, or to none. Internal to zero.
#pragma once

#include <optional>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/zero/bucket_views.h"
#include "lockstep/zero/parameter_sync.h"
#include "lockstep/zero/partition_cache.h"
#include "lockstep/zero/sharding.h"

namespace lockstep::detail {

class WholeParameters final : public Sharding {
 public:
  /// Takes what it needs of `partition`; made anew when that changes. Without a group this rank has all of it, and
  /// nothing is sent: `partition` is that of one rank.
  WholeParameters(PartitionCache& partition, bool as_bucket_view, GroupPtr group);

  std::vector<std::vector<at::Tensor>> local_parameters() const override;
  void on_trainability_change() override;
  std::vector<at::Tensor> own_gradients() const override;
  void sync() override;
  std::vector<StatePiece> pieces(const torch::optim::Optimizer& local) const override;
  OptimizerStateDict load(const StateSource& source) override;
  ShardingBytes bytes() const override;

  /// Bucket views only.
  const std::vector<std::vector<at::Tensor>>& buckets() const { return views_->buckets(); }

 private:
  struct Share {
    int64_t index;  // over all groups
    at::Tensor parameter;
  };

  const GroupPtr group_;
  std::vector<std::vector<Share>> own_;  // by group
  DeviceParameters device_parameters_;   // bucket views only
  // One of the two; without a group neither.
  std::optional<BucketViews> views_;
  std::optional<ParameterSync> sync_;
};

}  // namespace lockstep::detail
