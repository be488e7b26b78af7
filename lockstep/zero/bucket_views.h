// Parameters as views of flat buckets: one bucket for each rank, device and dtype, which holds the trainable parameters
// of that rank's share in their order. A bucket is sent as it is. Internal to zero.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/shard/flat_shard.h"
#include "lockstep/zero/arriving_parameters.h"

namespace lockstep::detail {

/// For every device, in the order in which devices appear: by rank, its parameters there.
using DeviceParameters = std::vector<std::pair<c10::Device, std::vector<std::vector<at::Tensor>>>>;

class BucketViews {
 public:
  /// Moves the parameters' values into new buckets, in memory that the group's backend reaches without a copy if it
  /// has such. Frozen parameters get memory of their own. Strides are kept where memory has no gaps, else parameters
  /// become contiguous. Local; all ranks must have the same devices in the same order.
  /// `memory` is FlatMemory::kViews or kStorages.
  BucketViews(const DeviceParameters& parameters, const GroupPtr& group, FlatMemory memory);

  /// By device and dtype, and by rank. One without a trainable parameter holds one zero, so that all ranks send as
  /// often.
  const std::vector<std::vector<at::Tensor>>& buckets() const { return buckets_; }
  /// Those that hold parameters.
  const std::vector<FlatShard>& flat_buffers() const { return flat_; }

  /// Sends every rank's buckets to all: rank by rank, device by device, dtype by dtype. Collective.
  std::vector<Arrival> launch(const GroupPtr& group) const;

  int64_t bytes() const;

 private:
  at::Tensor made_bucket(const std::vector<at::Tensor>& parameters, c10::Device device, const GroupPtr& group,
                         FlatMemory memory);

  std::vector<std::vector<at::Tensor>> buckets_;
  std::vector<FlatShard> flat_;
};

}  // namespace lockstep::detail
