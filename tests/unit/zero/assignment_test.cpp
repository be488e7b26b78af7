// Who steps which part of DDP's buckets.
#include "lockstep/zero/bucket_assignment.h"

#include "lockstep/testing/checks.h"
#include "lockstep/zero/overlap_info.h"

namespace lockstep {
namespace {

using Chunks = std::vector<BucketShard>;
using testing::expect_error;

// ZERO-51
TEST(BucketAssignment, GivesWholeBucketsToTheRanksInTurn) {
  const std::vector<std::vector<int64_t>> sizes = {{3}, {1, 1}, {5}, {2}, {4, 4, 4}};
  EXPECT_EQ(assign_bucket_shards(sizes, 2, false),
            (Chunks{{0, 0, 1, 0}, {1, 0, 2, 1}, {2, 0, 1, 0}, {3, 0, 1, 1}, {4, 0, 3, 0}}));
  EXPECT_EQ(assign_bucket_shards({{3}}, 4, false), (Chunks{{0, 0, 1, 0}}));
}

// ZERO-52
TEST(BucketAssignment, CutsBucketsIntoChunksBelowAnEqualShare) {
  EXPECT_EQ(assign_bucket_shards({{6, 2}, {3, 3, 2}}, 2, true),
            (Chunks{{0, 0, 1, 0}, {0, 1, 1, 1}, {1, 0, 2, 1}, {1, 2, 1, 0}}));
  EXPECT_EQ(assign_bucket_shards({{10}, {1, 1}}, 2, true), (Chunks{{0, 0, 1, 1}, {1, 0, 2, 0}}));
}

// ZERO-53
TEST(BucketAssignment, KeepsTheRemainderWithTheLastChunkWhenAllRanksHaveOne) {
  EXPECT_EQ(assign_bucket_shards({{4, 4, 2}}, 2, true), (Chunks{{0, 0, 1, 0}, {0, 1, 2, 1}}));
  EXPECT_EQ(assign_bucket_shards({{4, 4, 2}}, 1, true), (Chunks{{0, 0, 3, 0}}));
}

// ZERO-52, ZERO-53
TEST(BucketAssignment, CoversEveryParameterOnceWhateverTheSizesAre) {
  uint64_t random = 1;
  const auto next = [&](uint64_t below) {
    random = random * 6364136223846793005U + 1442695040888963407U;
    return static_cast<int64_t>((random >> 33U) % below);
  };
  for (int round = 0; round < 500; ++round) {
    std::vector<std::vector<int64_t>> sizes(1 + next(6));
    for (auto& bucket : sizes) {
      bucket.resize(1 + next(7));
      for (auto& size : bucket) size = next(4) == 0 ? 0 : next(100);
    }
    const int world_size = static_cast<int>(1 + next(5));
    for (const bool shard_buckets : {false, true}) {
      std::vector<std::size_t> covered(sizes.size());
      std::vector<std::set<int>> ranks(sizes.size());
      for (const auto& chunk : assign_bucket_shards(sizes, world_size, shard_buckets)) {
        ASSERT_EQ(chunk.offset, covered[chunk.bucket_index]);
        ASSERT_GT(chunk.count, 0U);
        ASSERT_TRUE(chunk.rank >= 0 && chunk.rank < world_size);
        ASSERT_TRUE(ranks[chunk.bucket_index].insert(chunk.rank).second) << "two chunks of a bucket for one rank";
        covered[chunk.bucket_index] += chunk.count;
      }
      for (std::size_t i = 0; i < sizes.size(); ++i) ASSERT_EQ(covered[i], sizes[i].size());
    }
  }
}

std::vector<at::Tensor> parameters(const std::vector<int64_t>& sizes) {
  std::vector<at::Tensor> all;
  for (const auto size : sizes) all.push_back(at::zeros({size}).requires_grad_());
  return all;
}

// ZERO-50, ZERO-51
TEST(BucketAssignment, RefusesWhatCannotBeStepped) {
  expect_error([] { assign_bucket_shards({{1}, {}}, 2, false); }, {"bucket 1 of 2 has no parameters"});
  expect_error([] { assign_bucket_shards({{1}}, 0, true); }, {"0 ranks"});
  expect_error([] { BucketAssignment(3, {}, 0); }, {"bucket 3: an assignment without parameters"});
  expect_error([] { BucketAssignment(3, {at::zeros({2})}, 0); }, {"bucket 3: a parameter in it needs no gradient"});
  expect_error([] { BucketAssignment(3, parameters({0, 0}), 0); }, {"bucket 3: parameters without an element"});
}

// ZERO-46
TEST(OverlapInfo, KnowsEveryRanksPartAndThePlacesOfItsOwn) {
  OverlapInfo info{.shard_buckets = true};
  const auto first = parameters({6, 2});
  const auto second = parameters({3, 3, 2});
  info.add_bucket(first);
  info.add_bucket(second);
  EXPECT_EQ(info.total_size, 16);
  info.assign(1, 2);
  EXPECT_EQ(info.num_bucket_assignments, 4U);
  EXPECT_EQ(info.assigned_ranks_per_bucket, (std::vector<std::set<int>>{{0, 1}, {0, 1}}));
  EXPECT_EQ(info.offsets, (std::map<std::size_t, std::size_t>{{0, 0}, {1, 1}}));
  ASSERT_EQ(info.params_per_rank[1].size(), 3U);
  EXPECT_TRUE(info.params_per_rank[1][0].is_same(first[1]));
  EXPECT_TRUE(info.params_per_rank[1][1].is_same(second[0]));
  EXPECT_TRUE(info.params_per_rank[1][2].is_same(second[1]));
  const auto& part = info.assignments_per_rank[0].at(1);
  EXPECT_EQ(part.bucket_index, 1U);
  EXPECT_EQ(part.offset, 2U);
  EXPECT_EQ(part.numel(), 2);
  EXPECT_TRUE(part.parameters.at(0).is_same(second[2]));
  EXPECT_EQ(part.device, c10::Device(at::kCPU));
  EXPECT_FALSE(part.tensor.defined());
}

// ZERO-46
TEST(OverlapInfo, HasATotalSizeOnlyIfBucketsAreSharded) {
  OverlapInfo info;
  info.add_bucket(parameters({6, 2}));
  EXPECT_FALSE(info.total_size.has_value());
  EXPECT_EQ(info.status, OverlapStatus::kUninitialized);
  expect_error([&] { info.add_bucket({}); }, {"bucket 1 has no parameters"});
}

// ZERO-47
TEST(OverlapInfo, RefusesToWaitForAnotherNumberOfBroadcasts) {
  OverlapInfo info;
  info.add_bucket(parameters({1}));
  info.add_bucket(parameters({1}));
  info.assign(0, 2);
  info.broadcast_handles.resize(1);
  expect_error([&] { info.wait_for_broadcasts("rank 0 of 2"); }, {"rank 0 of 2: 1 broadcasts were launched for 2"});
  info.broadcast_handles.resize(2);
  info.wait_for_broadcasts("rank 0 of 2");
  EXPECT_TRUE(info.broadcast_handles.empty());
}

// ZERO-47
TEST(OverlapInfo, ForgetsABackwardAndNothingElse) {
  OverlapInfo info;
  info.add_bucket(parameters({1}));
  info.assign(0, 1);
  info.bucket_indices_seen.push_back(0);
  info.bucket_index_to_future.emplace(0, completed_future(at::zeros({1})));
  info.bucket_index_to_bucket.emplace(0, GradBucket({}));
  info.clear_per_iter_info();
  EXPECT_TRUE(info.bucket_indices_seen.empty());
  EXPECT_TRUE(info.bucket_index_to_future.empty());
  EXPECT_TRUE(info.bucket_index_to_bucket.empty());
  EXPECT_EQ(info.num_bucket_assignments, 1U);
  EXPECT_EQ(info.params_per_bucket.size(), 1U);
}

}  // namespace
}  // namespace lockstep
