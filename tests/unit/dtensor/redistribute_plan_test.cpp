// Which steps lead from placements to placements, what they cost, and what is refused: from sizes alone.
#include "lockstep/dtensor/redistribute_plan.h"

#include <numeric>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "lockstep/base/str.h"
#include "lockstep/comm/fake/fake_backend.h"
#include "lockstep/comm/group_state.h"
#include "lockstep/comm/world.h"
#include "lockstep/dtensor/redistribute_limit.h"
#include "lockstep/dtensor/redistribute_local.h"
#include "lockstep/testing/gtest.h"

namespace lockstep::redistribute_plan_test {
namespace {

using testing::expect_error;
using Sizes = std::vector<int64_t>;

struct FakeMesh {
  std::vector<c10::intrusive_ptr<FakeBackend>> backends;  // by axis
  DeviceMesh mesh;
};

/// This rank's view of a mesh nobody else is in.
FakeMesh fake_mesh(const Sizes& shape, int rank = 0) {
  const auto layout = MeshLayout::row_major(shape);
  const auto coordinate = unravel(rank, shape);
  std::vector<c10::intrusive_ptr<FakeBackend>> backends;
  std::vector<GroupPtr> groups;
  std::vector<std::string> names;
  for (std::size_t axis = 0; axis < shape.size(); ++axis) {
    const auto size = static_cast<int>(shape[axis]);
    std::vector<int> ranks;
    for (const auto position : layout.axes()[axis].positions()) ranks.push_back(static_cast<int>(position));
    const auto first = rank - ranks[coordinate[axis]];
    for (auto& each : ranks) each += first;
    backends.push_back(c10::make_intrusive<FakeBackend>(coordinate[axis], size));
    groups.push_back(
        detail::wrap_backends({{at::kCPU, backends.back()}}, {.store = c10::make_intrusive<c10d::HashStore>(),
                                                              .rank = coordinate[axis],
                                                              .size = size,
                                                              .name = str("axis", axis),
                                                              .global_ranks = ranks,
                                                              .timeout = std::chrono::minutes(1)}));
    names.push_back(str("axis", axis));
  }
  std::vector<int> all(layout.size());
  std::iota(all.begin(), all.end(), 0);
  return {backends,
          DeviceMesh::from_group(groups, "cpu", {.mesh = {.ranks = all, .shape = shape}, .mesh_dim_names = names})};
}

/// "all_gather 1, slice 0": moves and axes.
std::string moves_of(const RedistributePlan& plan) {
  std::vector<std::string> moves;
  for (const auto& step : plan.steps) moves.push_back(str(name_of(step.move), " ", step.mesh_dim));
  return join(moves, ", ");
}

std::string moves(const Sizes& shape, const Placements& from, const Placements& to, const Sizes& sizes = {8, 8}) {
  const auto fake = fake_mesh(shape);
  return moves_of(plan_redistribute(Layout(fake.mesh, from, sizes), to, at::kFloat, {.allow_partial_target = true}));
}

// TP-23 to TP-29: one axis
TEST(RedistributePlan, TakesOneStepForOneAxis) {
  EXPECT_EQ(moves({4}, {Shard(0)}, {Replicate()}), "all_gather 0");
  EXPECT_EQ(moves({4}, {Replicate()}, {Shard(1)}), "slice 0");
  EXPECT_EQ(moves({4}, {Shard(0)}, {Shard(1)}), "all_to_all 0");
  EXPECT_EQ(moves({4}, {Partial()}, {Replicate()}), "all_reduce 0");
  EXPECT_EQ(moves({4}, {Partial()}, {Shard(1)}), "reduce_scatter 0");
  EXPECT_EQ(moves({4}, {Replicate()}, {Partial()}), "partition 0");
  EXPECT_EQ(moves({4}, {StridedShard(0, 2)}, {Shard(0)}), "all_gather 0, slice 0");
  EXPECT_EQ(moves({4}, {Shard(0)}, {StridedShard(0, 2)}), "all_gather 0, slice 0");
  EXPECT_EQ(moves({4}, {Partial()}, {StridedShard(0, 2)}), "all_reduce 0, slice 0");
  EXPECT_EQ(moves({4}, {RaggedShard(0, {1, 0, 5, 2})}, {Shard(0)}), "all_gather 0, slice 0");
  EXPECT_EQ(moves({4}, {Partial()}, {RaggedShard(0, {1, 0, 5, 2})}), "all_reduce 0, slice 0");
}

// TP-29: the same, also by another name, and axes of one rank
TEST(RedistributePlan, TakesNoStepWhereNothingMoves) {
  for (const Placement& placement : {Placement(Replicate()), Placement(Shard(1)), Placement(StridedShard(0, 2)),
                                     Placement(Partial()), Placement(RaggedShard(0, {8, 0}))}) {
    EXPECT_EQ(moves({2}, {placement}, {placement}), "");
  }
  EXPECT_EQ(moves({2}, {Shard(1)}, {Shard(-1)}), "");
  EXPECT_EQ(moves({1}, {Shard(0)}, {Replicate()}), "nothing 0");
  EXPECT_EQ(moves({1}, {Partial()}, {Shard(0)}), "nothing 0");
  EXPECT_EQ(moves({2, 1}, {Shard(0), Shard(0)}, {Replicate(), Shard(0)}), "all_gather 0") << "it cuts nothing";
  EXPECT_EQ(moves({1, 2}, {Shard(0), Shard(0)}, {Replicate(), Shard(0)}), "nothing 0");
}

// TP-30: what the left axis leaves to the right one changes, so the right one is gathered before
TEST(RedistributePlan, UnwindsNestedShardsFromTheInside) {
  const Sizes square = {2, 2};
  EXPECT_EQ(moves(square, {Shard(0), Shard(0)}, {Replicate(), Replicate()}), "all_gather 1, all_gather 0");
  EXPECT_EQ(moves(square, {Shard(0), Shard(0)}, {Replicate(), Shard(0)}), "all_gather 1, all_gather 0, slice 1");
  EXPECT_EQ(moves(square, {Replicate(), Shard(0)}, {Shard(0), Shard(0)}), "all_gather 1, slice 0, slice 1");
  EXPECT_EQ(moves(square, {Shard(0), Shard(0)}, {Shard(1), Shard(0)}), "all_gather 1, all_to_all 0, slice 1");
  EXPECT_EQ(moves(square, {Shard(0), Shard(0)}, {Shard(0), Shard(1)}), "all_to_all 1");
  EXPECT_EQ(moves(square, {Shard(0), Shard(1)}, {Shard(1), Shard(0)}), "all_gather 1, all_to_all 0, slice 1");
  EXPECT_EQ(moves(square, {Shard(0), Partial()}, {Shard(0), Shard(0)}), "reduce_scatter 1");
  EXPECT_EQ(moves(square, {Partial(), Shard(0)}, {Shard(0), Shard(0)}), "all_gather 1, reduce_scatter 0, slice 1");
}

// Whatever is cut is cut before, and gathered after, the rest is reduced and gathered.
TEST(RedistributePlan, MovesTheLeastItCan) {
  const Sizes square = {2, 2};
  EXPECT_EQ(moves(square, {Partial(), Shard(0)}, {Replicate(), Replicate()}), "all_reduce 0, all_gather 1");
  EXPECT_EQ(moves(square, {Partial(), Replicate()}, {Replicate(), Shard(0)}), "slice 1, all_reduce 0");
  EXPECT_EQ(moves(square, {Partial(), Partial()}, {Replicate(), Shard(0)}), "reduce_scatter 1, all_reduce 0");
  EXPECT_EQ(moves(square, {Shard(1), Replicate()}, {Replicate(), Shard(0)}), "slice 1, all_gather 0");
}

// TP-29: a StridedShard that stands for "cut after the axis to the right" is gathered, and cut, while that one stays
TEST(RedistributePlan, MovesFsdpOverTensorParallelAlone) {
  const Sizes square = {2, 2};
  EXPECT_EQ(moves(square, {StridedShard(0, 2), Shard(0)}, {Replicate(), Shard(0)}), "all_gather 0");
  EXPECT_EQ(moves(square, {Replicate(), Shard(0)}, {StridedShard(0, 2), Shard(0)}), "slice 0");
  EXPECT_EQ(moves(square, {Partial(), Shard(0)}, {StridedShard(0, 2), Shard(0)}), "all_reduce 0, slice 0");
  const Sizes uneven = {7, 8};
  EXPECT_EQ(moves(square, {StridedShard(0, 2), Shard(0)}, {Replicate(), Shard(0)}, uneven),
            "all_gather 1, all_gather 0, slice 1");
  EXPECT_EQ(moves(square, {Replicate(), Shard(0)}, {StridedShard(0, 2), Shard(0)}, uneven),
            "all_gather 1, slice 0, slice 1");
}

// TP-59
TEST(RedistributePlan, CountsTheBytesThisRankReceives) {
  const auto bytes = [](const Sizes& shape, int rank, const Placements& from, const Placements& to, const Sizes& sizes,
                        at::ScalarType dtype = at::kFloat) {
    return plan_redistribute(Layout(fake_mesh(shape, rank).mesh, from, sizes), to, dtype).bytes();
  };
  EXPECT_EQ(bytes({4}, 0, {Shard(0)}, {Replicate()}, {8, 4}), 24 * 4);
  EXPECT_EQ(bytes({4}, 0, {Shard(0)}, {Replicate()}, {8, 4}, at::kBFloat16), 24 * 2);
  EXPECT_EQ(bytes({4}, 0, {Shard(0)}, {Replicate()}, {5}), 3 * 4);
  EXPECT_EQ(bytes({4}, 3, {Shard(0)}, {Replicate()}, {5}), 5 * 4) << "it has none";
  EXPECT_EQ(bytes({4}, 1, {Partial()}, {Replicate()}, {8, 4}), 2 * 24 * 4);
  EXPECT_EQ(bytes({4}, 1, {Partial()}, {Shard(0)}, {8, 4}), 24 * 4);
  EXPECT_EQ(bytes({4}, 1, {Shard(0)}, {Shard(1)}, {8, 4}), 6 * 4);
  EXPECT_EQ(bytes({4}, 1, {Replicate()}, {Shard(1)}, {8, 4}), 0);
  EXPECT_EQ(bytes({2, 2}, 3, {Shard(0), Shard(0)}, {Replicate(), Replicate()}, {8}), (2 + 4) * 4);
  EXPECT_EQ(bytes({2}, 1, {Shard(1)}, {Replicate()}, {0, 4}), 0);
}

// TP-59: collective, bytes and ranks of each step
TEST(RedistributePlan, IsPrinted) {
  const auto fake = fake_mesh({2, 4});
  const Layout layout(fake.mesh, {Partial(), Shard(0)}, {8, 4});
  const auto plan = plan_redistribute(layout, {Shard(0), Shard(0)}, at::kFloat);
  EXPECT_EQ(plan.to_string(),
            "mesh dim 1: Shard(dim=0) -> Replicate(): all_gather over 4 ranks, 96 bytes\n"
            "mesh dim 0: Partial(sum) -> Shard(dim=0): reduce_scatter over 2 ranks, 64 bytes\n"
            "mesh dim 1: Replicate() -> Shard(dim=0): slice\n"
            "together 160 bytes");
  EXPECT_EQ(str(plan), plan.to_string());
  EXPECT_EQ(plan_redistribute(layout, {Partial(), Shard(0)}, at::kFloat).to_string(), "nothing to do");
  for (const auto& backend : fake.backends) EXPECT_TRUE(backend->calls().empty());
}

// TP-28
TEST(RedistributePlan, RefusesPartialAsATarget) {
  const auto fake = fake_mesh({2, 2}, 3);
  const auto plan = [&](const Placement& from, const Placement& to, bool is_allowed) {
    return plan_redistribute(Layout(fake.mesh, {Replicate(), from}, {8}), {Replicate(), to}, at::kFloat,
                             {.allow_partial_target = is_allowed});
  };
  expect_error([&] { plan(Replicate(), Partial(), false); },
               {"[lockstep/dtensor] rank 3", "axis1", "from Replicate() to Partial(sum) on mesh dim 1", "Leave it"});
  for (const bool is_allowed : {false, true}) {
    expect_error([&] { plan(Shard(0), Partial(), is_allowed); }, {"from Shard(dim=0) to Partial(sum)", "a part"});
    expect_error([&] { plan(StridedShard(0, 2), Partial(), is_allowed); }, {"a part is not a term"});
    expect_error([&] { plan(Partial(), Partial(ReduceOp::MAX), is_allowed); },
                 {"from Partial(sum) to Partial(max)", "one reduction"});
  }
  EXPECT_EQ(moves_of(plan(Replicate(), Partial(ReduceOp::MAX), true)), "partition 1");
  expect_error([&] { plan(Replicate(), Partial(ReduceOp::PRODUCT), true); }, {"Partial(product)", "no terms"});
  EXPECT_EQ(moves_of(plan(Partial(), Partial(), false)), "");
}

// TP-17, TP-28: what no layout may have
TEST(RedistributePlan, RefusesWhatLayoutsRefuse) {
  const Layout layout(fake_mesh({2, 2}).mesh, {Shard(0), Replicate()}, {8});
  expect_error([&] { plan_redistribute(layout, {Replicate()}, at::kFloat); }, {"1 placements", "2 mesh dims"});
  expect_error([&] { plan_redistribute(layout, {Shard(1), Replicate()}, at::kFloat); }, {"dim 1", "1 dims"});
}

TEST(RedistributeBytes, ChooseTheCheaperWay) {
  const auto cost = [](const Placements& from, const Placements& to, const Sizes& sizes = {8, 8}) {
    return redistribute_bytes(Layout(fake_mesh({4}).mesh, from, sizes), to, at::kFloat);
  };
  EXPECT_EQ(cost({Shard(0)}, {Shard(0)}), 0);
  EXPECT_EQ(cost({Replicate()}, {Shard(0)}), 1);
  const auto gather = cost({Shard(0)}, {Replicate()});
  EXPECT_EQ(gather, 3 * 64 + 1);
  EXPECT_EQ(cost({Partial()}, {Replicate()}), 2 * 3 * 64 + 1);
  EXPECT_EQ(cost({Partial()}, {Shard(1)}), gather);
  EXPECT_EQ(cost({Shard(0)}, {Shard(1)}), 3 * 64 / 4 + 1);
  EXPECT_EQ(cost({Replicate()}, {Partial()}), kNoWay);
  EXPECT_EQ(cost({Shard(0)}, {Partial()}), kNoWay);
  EXPECT_GT(cost({StridedShard(0, 2)}, {Shard(0)}), gather) << "gathered, then cut";
  EXPECT_EQ(redistribute_bytes(Layout(fake_mesh({1}).mesh, {Shard(0)}, {8, 8}), {Replicate()}, at::kFloat), 0);
}

// Nested shards that look alike have to be gathered all the same.
TEST(RedistributeBytes, SeeWhatHasToBeUnwound) {
  const auto cost = [](const Placements& from, const Placements& to) {
    return redistribute_bytes(Layout(fake_mesh({2, 2}).mesh, from, {8, 8}), to, at::kFloat);
  };
  EXPECT_GT(cost({Shard(0), Shard(0)}, {Replicate(), Shard(0)}), cost({Shard(0), Shard(1)}, {Replicate(), Shard(1)}));
  EXPECT_EQ(cost({Shard(0), Shard(0)}, {Replicate(), Replicate()}), 64 + 128 + 2);
}

// TP-59
TEST(RedistributeLimit, RefusesAPlanAboveIt) {
  const auto fake = fake_mesh({4}, 0);
  const Layout layout(fake.mesh, {Shard(0)}, {5});
  const auto local = at::ones({2});
  const auto gather = [&] { return detail::redistribute_local(local, layout, {Replicate()}); };
  {
    const RedistributeLimit limit(16);
    const auto text = expect_error(gather, {"rank 0", "Shard(dim=0)", "brings 20 bytes", "Limit is 16"});
    EXPECT_NE(text.find("all_gather over 4 ranks, 12 bytes"), std::string::npos) << "rank 3 would receive 20: " << text;
    EXPECT_TRUE(fake.backends[0]->calls().empty());
    const RedistributeLimit higher(1000);
    expect_error(gather, {"is 16"});
    EXPECT_EQ(detail::redistribute_local(at::ones({5}), Layout(fake.mesh, {Replicate()}, {5}), {Shard(0)}).size(0), 2);
  }
  const RedistributeLimit enough(20);
  EXPECT_EQ(gather().size(0), 5);
  expect_error([] { const RedistributeLimit negative(-1); }, {"-1 bytes"});
}

// The tensor has to be what the layout says, before anything is sent.
TEST(RedistributeLocal, RefusesATensorOfOtherSizes) {
  const auto fake = fake_mesh({2}, 1);
  const Layout layout(fake.mesh, {Shard(0)}, {5, 2});
  expect_error([&] { detail::redistribute_local(at::ones({3, 2}), layout, {Replicate()}); },
               {"rank 1", "[3, 2]", "[2, 2]"});
  EXPECT_TRUE(fake.backends[0]->calls().empty());
}

}  // namespace
}  // namespace lockstep::redistribute_plan_test
