#include "lockstep/zero/bucket_views.h"

#include <ATen/ops/zeros.h>

#include "lockstep/comm/collectives.h"

namespace lockstep::detail {

BucketViews::BucketViews(const DeviceParameters& parameters, const GroupPtr& group) {
  for (const auto& [device, per_rank] : parameters) {
    auto& buckets = buckets_.emplace_back();
    for (const auto& each : per_rank) buckets.push_back(made_bucket(each, device, group));
  }
}

at::Tensor BucketViews::made_bucket(const std::vector<at::Tensor>& parameters, c10::Device device,
                                    const GroupPtr& group) {
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
  flat_.emplace_back(flat_layout_of(trainable, /*world_size=*/1), /*rank=*/0, trainable, group, FlatMemory::kViews);
  return flat_.back().buffer();
}

void BucketViews::sync(const GroupPtr& group) const {
  std::vector<Pending> pending;
  for (int rank = 0; rank < group->getSize(); ++rank) {
    for (const auto& buckets : buckets_) pending.push_back(launch_broadcast(buckets[rank], rank, group));
  }
  for (auto& each : pending) each.wait();
}

int64_t BucketViews::bytes() const {
  int64_t bytes = 0;
  for (const auto& buckets : buckets_) {
    for (const auto& bucket : buckets) bytes += static_cast<int64_t>(bucket.nbytes());
  }
  return bytes;
}

}  // namespace lockstep::detail
