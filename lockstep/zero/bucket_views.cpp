#include "lockstep/zero/bucket_views.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "lockstep/comm/collectives.h"

namespace lockstep::detail {
namespace {

using PerRank = std::vector<std::vector<at::Tensor>>;

/// In the order in which dtypes appear, which is the same on all ranks: each knows what all have.
std::vector<PerRank> by_dtype(const PerRank& per_rank) {
  std::vector<std::pair<at::ScalarType, PerRank>> found;
  for (std::size_t rank = 0; rank < per_rank.size(); ++rank) {
    for (const auto& parameter : per_rank[rank]) {
      auto place = std::find_if(found.begin(), found.end(),
                                [&](const auto& each) { return each.first == parameter.scalar_type(); });
      if (place == found.end()) place = found.insert(place, {parameter.scalar_type(), PerRank(per_rank.size())});
      place->second[rank].push_back(parameter);
    }
  }
  std::vector<PerRank> lists;
  for (auto& [dtype, parameters] : found) lists.push_back(std::move(parameters));
  return lists;
}

}  // namespace

BucketViews::BucketViews(const DeviceParameters& parameters, const GroupPtr& group, FlatMemory memory) {
  for (const auto& [device, per_rank] : parameters) {
    for (const auto& of_dtype : by_dtype(per_rank)) {
      auto& buckets = buckets_.emplace_back();
      for (const auto& each : of_dtype) buckets.push_back(made_bucket(each, device, group, memory));
    }
  }
}

at::Tensor BucketViews::made_bucket(const std::vector<at::Tensor>& parameters, c10::Device device,
                                    const GroupPtr& group, FlatMemory memory) {
  std::vector<at::Tensor> trainable;
  int64_t total = 0;
  for (const auto& parameter : parameters) {
    if (parameter.requires_grad()) {
      trainable.push_back(parameter);
      total += parameter.numel();
    } else {
      // It may be a view of a bucket that ends here.
      parameter.set_data(parameter.detach().clone());
    }
  }
  if (total == 0) return at::zeros({1}, at::TensorOptions(at::kFloat).device(device));
  flat_.emplace_back(flat_layout_of(trainable, /*world_size=*/1), /*rank=*/0, trainable, group, memory);
  return flat_.back().buffer();
}

std::vector<Arrival> BucketViews::launch(const GroupPtr& group) const {
  std::vector<Arrival> arrivals;
  for (int rank = 0; rank < group->getSize(); ++rank) {
    for (const auto& buckets : buckets_) {
      auto& arrival = arrivals.emplace_back(Arrival{.pending = {launch_broadcast(buckets[rank], rank, group)}});
      const auto flat = std::find_if(flat_.begin(), flat_.end(),
                                     [&](const auto& each) { return each.buffer().is_same(buckets[rank]); });
      if (flat != flat_.end()) arrival.parameters = flat->parameters();
    }
  }
  return arrivals;
}

int64_t BucketViews::bytes() const {
  int64_t bytes = 0;
  for (const auto& buckets : buckets_) {
    for (const auto& bucket : buckets) bytes += static_cast<int64_t>(bucket.nbytes());
  }
  return bytes;
}

}  // namespace lockstep::detail
