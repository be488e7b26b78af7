// Mean and variance of a batch of which every rank has some rows. Internal to SyncBatchNorm. What lies on an
// accelerator stays there: the host waits for no number, and takes no more calls for more ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "lockstep/comm/group.h"

namespace lockstep::detail {

/// Over all ranks.
struct BatchStatistics {
  at::Tensor mean;      // per channel
  at::Tensor variance;  // per channel, not corrected
  at::Tensor count;     // of values per channel; one double, where the input is
};

/// Channels are dim 1.
std::vector<int64_t> all_dims_but_channels(const at::Tensor& input);

/// Of the rows of all ranks, some of which may have none; the same bits on all of them. In at least single precision.
/// Collective and blocking. Throws if there is no more than one value per channel on all ranks together.
BatchStatistics gather_statistics(const at::Tensor& input, const GroupPtr& group);

/// Row r of `all` is what rank r gives: means, sums of squared deviations, number of values. Both give the same, up to
/// rounding; in double. The first is a loop over the ranks, the second a few calls for any number of them.
BatchStatistics combined_in_rank_order(const at::Tensor& all);
BatchStatistics combined_at_once(const at::Tensor& all);

}  // namespace lockstep::detail
