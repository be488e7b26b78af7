// Division by whole parameters: every parameter belongs to one rank, or to none. Internal to zero.
#pragma once

#include <optional>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/zero/bucket_views.h"
#include "lockstep/zero/division.h"
#include "lockstep/zero/parameter_sync.h"
#include "lockstep/zero/partition_cache.h"

namespace lockstep::detail {

class WholeParameters final : public Division {
 public:
  /// `partition`, which it refers to, says who has what. Without a group this rank has all of it, and nothing is sent:
  /// then `partition` is that of one rank. `is_awaited_later` as of ParameterSync.
  WholeParameters(PartitionCache& partition, bool as_bucket_view, bool is_awaited_later, GroupPtr group);

  /// Reads the partition again, which must be that of these groups.
  void set_groups(std::vector<std::vector<at::Tensor>> groups) override;
  std::vector<std::vector<at::Tensor>> local_parameters() const override;
  void on_trainability_change() override;
  std::vector<at::Tensor> own_gradients() const override;
  std::vector<const FlatShard*> flat_buffers() const override;
  std::vector<Arrival> launch_sync() override;
  std::vector<StatePiece> pieces(const OptimizerStateDict& local) const override;
  OptimizerStateDict load(const StateSource& source) override;
  ShardingBytes bytes() const override;

  /// Bucket views only.
  const std::vector<std::vector<at::Tensor>>& buckets() const { return views_->buckets(); }

 private:
  struct OwnParameter {
    int64_t index;  // over all groups
    at::Tensor parameter;
  };

  void make_views();

  PartitionCache& partition_;
  const bool as_bucket_view_;
  const bool is_awaited_later_;
  const GroupPtr group_;
  std::vector<std::vector<OwnParameter>> own_;  // by group
  DeviceParameters device_parameters_;          // bucket views only
  // One of the two; without a group neither.
  std::optional<BucketViews> views_;
  std::optional<ParameterSync> sync_;
};

}  // namespace lockstep::detail
