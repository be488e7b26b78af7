// Shards of about as many bytes on every rank, where the chunk rule gives what does not divide evenly to the first
// ones.
//
//   const auto balance = std::make_shared<lockstep::ShardBalance>();
//   for (auto& block : *model->blocks) lockstep::fully_shard(*block, {.balance = balance});
//   lockstep::fully_shard(*model, {.balance = balance});
#pragma once

#include <cstdint>
#include <vector>

namespace lockstep {

/// Units that get the same one are balanced together, in the order in which they are sharded. For one rank, the same
/// on all. Not thread-safe.
class ShardBalance {
 public:
  /// How many of `rows` each rank gets: all as many, and one more those that have fewest bytes so far.
  std::vector<int64_t> divide(int64_t rows, int64_t row_bytes, int64_t ranks);

  /// By rank, of all that was divided.
  const std::vector<int64_t>& bytes() const { return bytes_; }

 private:
  std::vector<int64_t> bytes_;
};

}  // namespace lockstep
