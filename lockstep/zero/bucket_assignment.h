// Which rank steps which shard of DDP's buckets, when ZeRO's step overlaps with DDP's backward. A pure function of
// sizes, so that all ranks come to the same result without a message.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace lockstep {

/// Parameters [offset, offset + count) of a bucket go to `rank`.
struct BucketShard {
  std::size_t bucket_index = 0;
  std::size_t offset = 0;
  std::size_t count = 0;
  int rank = 0;

  bool operator==(const BucketShard&) const = default;
};

/// Ordered by bucket and offset; together the shards cover every parameter once, and a rank has at most one shard of a
/// bucket. `sizes` are elements, by bucket and parameter. Whole buckets go to the ranks in turn. With `shard_buckets`,
/// from the smallest bucket to the largest, shards of less than an equal part of all elements go to the rank with the
/// least so far that has none of the bucket; what is left when all ranks have one stays with the last shard. Parameters
/// are never cut. Throws on a bucket without parameters.
std::vector<BucketShard> assign_bucket_shards(const std::vector<std::vector<int64_t>>& sizes, int world_size,
                                              bool shard_buckets);

/// A shard at work, the same on all ranks.
struct BucketAssignment {
  /// Throws if `parameters` is empty or holds no element, if one needs no gradient, or if they are on several devices.
  BucketAssignment(std::size_t bucket_index, std::vector<at::Tensor> parameters, std::size_t offset);

  std::size_t bucket_index;
  std::vector<at::Tensor> parameters;
  std::size_t offset;  // of the first parameter, in the bucket's list
  c10::Device device;
  /// What is sent: holds the parameters, which are views of it. Undefined until they are moved there.
  at::Tensor tensor = {};

  int64_t numel() const;
};

}  // namespace lockstep
