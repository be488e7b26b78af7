// Placements as values, and as libtorch's classes.
#include "lockstep/shard/placement.h"

#include "lockstep/base/str.h"
#include "lockstep/shard/torch_placement.h"
#include "lockstep/testing/gtest.h"

namespace lockstep {
namespace {

using testing::expect_error;

const Placements kAll = {Replicate(), Shard(0), Shard(-1), StridedShard(1, 4), Partial(), Partial(ReduceOp::MAX)};

// TP-13
TEST(Placement, ComparesByKindAndContents) {
  for (std::size_t i = 0; i < kAll.size(); ++i) {
    for (std::size_t j = 0; j < kAll.size(); ++j) EXPECT_EQ(kAll[i] == kAll[j], i == j) << kAll[i] << " " << kAll[j];
  }
  EXPECT_EQ(Placement(Partial()), Placement(Partial(ReduceOp::SUM)));
  EXPECT_NE(Placement(StridedShard(0, 1)), Placement(Shard(0))) << "as in Python";
  EXPECT_EQ(Placement(), Placement(Replicate()));
}

// TP-13
TEST(Placement, SaysWhichDimItShards) {
  EXPECT_EQ(sharded_dim(Shard(2)), 2);
  EXPECT_EQ(sharded_dim(StridedShard(-1, 2)), -1);
  EXPECT_EQ(sharded_dim(Replicate()), std::nullopt);
  EXPECT_EQ(sharded_dim(Partial()), std::nullopt);
}

// TP-13
TEST(Placement, IsPrinted) {
  EXPECT_EQ(to_string(Placement(Replicate())), "Replicate()");
  EXPECT_EQ(to_string(Placement(Shard(-1))), "Shard(dim=-1)");
  EXPECT_EQ(to_string(Placement(StridedShard(0, 2))), "StridedShard(dim=0, split_factor=2)");
  EXPECT_EQ(to_string(Placement(Partial(ReduceOp::PRODUCT))), "Partial(product)");
  EXPECT_EQ(to_string(Placements{Shard(0), Replicate()}), "(Shard(dim=0), Replicate())");
  EXPECT_EQ(to_string(Placements{Partial()}), "(Partial(sum),)");
  EXPECT_EQ(str(Placement(Shard(1))), "Shard(dim=1)");
}

// TP-13
TEST(TorchPlacement, ComesBackAsItWas) {
  auto all = kAll;
  for (const auto op : kPartialOps) all.emplace_back(Partial(op));
  for (const auto& placement : all) EXPECT_EQ(from_torch(*to_torch(placement)), placement) << placement;
}

TEST(TorchPlacement, HasLibtorchsClasses) {
  namespace theirs = torch::distributed;
  EXPECT_TRUE(to_torch(Shard(1))->is_shard(1));
  EXPECT_TRUE(to_torch(Replicate())->is_replicate());
  EXPECT_TRUE(to_torch(Partial(ReduceOp::AVG))->is_partial("avg"));
  const auto strided = to_torch(StridedShard(1, 4));
  EXPECT_EQ(dynamic_cast<const theirs::StridedShard&>(*strided).split_factor, 4);
}

TEST(TorchPlacement, RefusesWhatHasNoCounterpart) {
  expect_error([] { to_torch(RaggedShard(0, {1, 2})); }, {"RaggedShard(dim=0, 1+2)"});
  namespace theirs = torch::distributed;
  struct Foreign : theirs::Placement {};
  expect_error([] { from_torch(Foreign()); }, {"[lockstep/shard]", "Foreign", "Use Shard"});
  expect_error([] { from_torch(theirs::Partial("median")); }, {"[lockstep/shard]", "median", "sum, avg"});
}

}  // namespace
}  // namespace lockstep
