// What a rank knows while ZeRO's step overlaps with DDP's backward: DDP's buckets, who steps which shard of them, and
// how far the current backward has come. Filled in by the overlap's hook; programs read it.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "lockstep/comm/pending.h"
#include "lockstep/ddp/comm_hook.h"
#include "lockstep/zero/bucket_assignment.h"

namespace lockstep {

/// Only ever moves on.
enum class OverlapStatus {
  /// DDP may still lay its buckets out anew.
  kUninitialized = 0,
  /// The buckets are final, and are being noted.
  kDdpHasRebuiltBuckets = 1,
  /// Backwards update the parameters.
  kInitialized = 2,
};

struct OverlapInfo {
  OverlapStatus status = OverlapStatus::kUninitialized;
  bool shard_buckets = false;

  // Fixed once the status is kInitialized. Ranks are those of the group.
  std::vector<std::vector<at::Tensor>> params_per_bucket = {};
  /// By bucket.
  std::vector<std::vector<at::Tensor>> params_per_rank = {};
  /// By bucket of which this rank steps a shard: the position of the shard's first parameter among this rank's.
  std::map<std::size_t, std::size_t> offsets = {};
  std::vector<std::set<int>> assigned_ranks_per_bucket = {};
  /// By rank and bucket.
  std::vector<std::map<std::size_t, BucketAssignment>> assignments_per_rank = {};
  std::size_t num_bucket_assignments = 0;
  /// Elements of all buckets, if shard_buckets.
  std::optional<int64_t> total_size = std::nullopt;

  // Of the current backward.
  std::vector<Pending> broadcast_handles = {};
  std::vector<std::size_t> bucket_indices_seen = {};
  std::map<std::size_t, FuturePtr> bucket_index_to_future = {};
  std::map<std::size_t, GradBucket> bucket_index_to_bucket = {};

  /// Notes the next bucket; they come in order.
  void add_bucket(const std::vector<at::Tensor>& parameters);
  /// Divides the buckets that were noted. Changes nothing if it throws.
  void assign(int rank, int world_size);
  /// Waits for the broadcasts of a backward, of which there must be one for each assignment. `who` opens the message.
  void wait_for_broadcasts(const std::string& who);
  void clear_per_iter_info();
};

}  // namespace lockstep
