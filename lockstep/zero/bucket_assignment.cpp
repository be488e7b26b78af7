#include "lockstep/zero/bucket_assignment.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>

#include "lockstep/zero/partition.h"

namespace lockstep {
namespace {

int64_t sum_of(const std::vector<int64_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
}

std::vector<BucketShard> in_turn(const std::vector<std::vector<int64_t>>& sizes, int world_size) {
  std::vector<BucketShard> shards;
  for (std::size_t bucket = 0; bucket < sizes.size(); ++bucket) {
    shards.push_back({bucket, 0, sizes[bucket].size(), static_cast<int>(bucket % world_size)});
  }
  return shards;
}

/// The first parameter of every shard of one bucket.
std::vector<std::size_t> shard_starts(const std::vector<int64_t>& sizes, double threshold, int world_size) {
  std::vector<std::size_t> starts = {0};
  int64_t in_shard = 0;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const bool is_full = static_cast<double>(in_shard + sizes[i]) >= threshold && i > starts.back();
    // A rank takes one shard of a bucket, so there cannot be more shards than ranks.
    if (is_full && starts.size() < static_cast<std::size_t>(world_size)) {
      starts.push_back(i);
      in_shard = 0;
    }
    in_shard += sizes[i];
  }
  return starts;
}

std::vector<BucketShard> in_shards(const std::vector<std::vector<int64_t>>& sizes, int world_size) {
  std::vector<std::size_t> order(sizes.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t one, std::size_t other) { return sum_of(sizes[one]) < sum_of(sizes[other]); });
  int64_t total = 0;
  for (const auto& bucket : sizes) total += sum_of(bucket);
  const double threshold = static_cast<double>(total) / world_size;

  std::vector<BucketShard> shards;
  std::vector<int64_t> loads(world_size);
  for (const auto bucket : order) {
    auto ends = shard_starts(sizes[bucket], threshold, world_size);
    ends.erase(ends.begin());
    ends.push_back(sizes[bucket].size());
    std::vector<bool> has_shard(world_size);
    std::size_t start = 0;
    for (const auto end : ends) {
      const auto rank = least_loaded(loads, has_shard);
      has_shard[rank] = true;
      for (auto i = start; i < end; ++i) loads[rank] += sizes[bucket][i];
      shards.push_back({bucket, start, end - start, static_cast<int>(rank)});
      start = end;
    }
  }
  std::stable_sort(shards.begin(), shards.end(),
                   [](const auto& one, const auto& other) { return one.bucket_index < other.bucket_index; });
  return shards;
}

}  // namespace

std::vector<BucketShard> assign_bucket_shards(const std::vector<std::vector<int64_t>>& sizes, int world_size,
                                              bool shard_buckets) {
  TORCH_CHECK(world_size > 0, "[lockstep/zero] buckets cannot be assigned to ", world_size, " ranks");
  for (std::size_t bucket = 0; bucket < sizes.size(); ++bucket) {
    TORCH_CHECK(!sizes[bucket].empty(), "[lockstep/zero] bucket ", bucket, " of ", sizes.size(), " has no parameters");
  }
  return shard_buckets ? in_shards(sizes, world_size) : in_turn(sizes, world_size);
}

BucketAssignment::BucketAssignment(std::size_t bucket_index, std::vector<at::Tensor> parameters, std::size_t offset)
    : bucket_index(bucket_index), parameters(std::move(parameters)), offset(offset), device(at::kCPU) {
  TORCH_CHECK(!this->parameters.empty(), "[lockstep/zero] bucket ", bucket_index, ": an assignment without parameters");
  device = this->parameters.front().device();
  for (const auto& parameter : this->parameters) {
    TORCH_CHECK(parameter.requires_grad(), "[lockstep/zero] bucket ", bucket_index,
                ": a parameter in it needs no gradient. It must not be frozen while DDP reduces it.");
    TORCH_CHECK(parameter.device() == device, "[lockstep/zero] bucket ", bucket_index, ": parameters on ", device.str(),
                " and on ", parameter.device().str());
  }
  TORCH_CHECK(numel() > 0, "[lockstep/zero] bucket ", bucket_index, ": parameters without an element");
}

int64_t BucketAssignment::numel() const {
  int64_t sum = 0;
  for (const auto& parameter : parameters) sum += parameter.numel();
  return sum;
}

}  // namespace lockstep
