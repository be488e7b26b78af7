#include "lockstep/zero/overlap_info.h"

#include <c10/util/Exception.h>

namespace lockstep {

void OverlapInfo::add_bucket(const std::vector<at::Tensor>& parameters) {
  TORCH_CHECK(!parameters.empty(), "[lockstep/zero] bucket ", params_per_bucket.size(), " has no parameters");
  params_per_bucket.push_back(parameters);
  if (!shard_buckets) return;
  int64_t size = total_size.value_or(0);
  for (const auto& parameter : parameters) size += parameter.numel();
  total_size = size;
}

void OverlapInfo::assign(int rank, int world_size) {
  std::vector<std::vector<int64_t>> sizes;
  for (const auto& bucket : params_per_bucket) {
    auto& of_bucket = sizes.emplace_back();
    for (const auto& parameter : bucket) of_bucket.push_back(parameter.numel());
  }
  auto next = *this;
  next.params_per_rank.assign(world_size, {});
  next.assignments_per_rank.assign(world_size, {});
  next.assigned_ranks_per_bucket.assign(params_per_bucket.size(), {});
  next.offsets.clear();
  next.num_bucket_assignments = 0;
  for (const auto& shard : assign_bucket_shards(sizes, world_size, shard_buckets)) {
    const auto first = params_per_bucket[shard.bucket_index].begin() + static_cast<std::ptrdiff_t>(shard.offset);
    std::vector<at::Tensor> parameters(first, first + static_cast<std::ptrdiff_t>(shard.count));
    auto& of_rank = next.params_per_rank[shard.rank];
    if (shard.rank == rank) next.offsets[shard.bucket_index] = of_rank.size();
    of_rank.insert(of_rank.end(), parameters.begin(), parameters.end());
    next.assigned_ranks_per_bucket[shard.bucket_index].insert(shard.rank);
    next.assignments_per_rank[shard.rank].emplace(
        shard.bucket_index, BucketAssignment(shard.bucket_index, std::move(parameters), shard.offset));
    ++next.num_bucket_assignments;
  }
  *this = std::move(next);
}

void OverlapInfo::wait_for_broadcasts(const std::string& who) {
  TORCH_CHECK(broadcast_handles.size() == num_bucket_assignments, who, ": ", broadcast_handles.size(),
              " broadcasts were launched for ", num_bucket_assignments, " assignments of buckets");
  for (auto& each : broadcast_handles) each.wait();
  broadcast_handles.clear();
}

void OverlapInfo::clear_per_iter_info() {
  bucket_indices_seen.clear();
  bucket_index_to_future.clear();
  bucket_index_to_bucket.clear();
}

}  // namespace lockstep
