#include "lockstep/comm/collectives.h"
#include "lockstep/comm/world.h"
#include "lockstep/mesh/device_mesh.h"
#include "lockstep/testing/gtest.h"
#include "lockstep/testing/recorder.h"

namespace lockstep {
namespace {

using lockstep::testing::expect_error;
using Ranks = std::vector<int>;

struct RowsAndColumns {
  GroupPtr row;
  GroupPtr column;
};

RowsAndColumns make_groups(const World& world) {
  return {.row = new_subgroups(world.group(), {{0, 1}, {2, 3}}),
          .column = new_subgroups(world.group(), {{0, 2}, {1, 3}})};
}

const RankArray kSquare = {.ranks = {0, 1, 2, 3}, .shape = {2, 2}};

// TP-9: groups, array and names that fit; nothing is communicated
LOCKSTEP_RANK_TEST(FromGroup, BuildsAMeshOverGroupsThatExist, 4) {
  const auto groups = make_groups(world);
  const testing::Recorder recorder;
  const auto mesh =
      DeviceMesh::from_group({groups.column, groups.row}, "cpu", {.mesh = kSquare, .mesh_dim_names = {"dp", "tp"}});
  EXPECT_TRUE(recorder.events().empty());
  EXPECT_EQ(mesh.get_group("dp"), groups.column);
  EXPECT_EQ(mesh.get_group("tp"), groups.row);
  EXPECT_EQ(mesh.get_coordinate(), (Ranks{world.rank() / 2, world.rank() % 2}));
  EXPECT_EQ(mesh["tp"].get_group(), groups.row);
  auto tensor = at::ones({1});
  all_reduce(tensor, mesh.flatten().get_group());
  EXPECT_EQ(tensor.item<float>(), 4);
}

// TP-9, TP-10: a mesh over the same ranks is equal, wherever its groups came from
LOCKSTEP_THREAD_TEST(FromGroup, EqualsAMeshThatMadeItsGroups, 4) {
  const auto groups = make_groups(world);
  const auto mesh =
      DeviceMesh::from_group({groups.column, groups.row}, "cpu", {.mesh = kSquare, .mesh_dim_names = {"dp", "tp"}});
  EXPECT_EQ(mesh, init_device_mesh("cpu", {2, 2}, {.mesh_dim_names = {"dp", "tp"}}));
}

// TP-9: one group, with or without its ranks
LOCKSTEP_THREAD_TEST(FromGroup, ReadsTheRanksOfOneGroup, 4) {
  const auto row = make_groups(world).row;
  const auto mesh = DeviceMesh::from_group(row, "cpu");
  EXPECT_EQ(mesh.ranks(), global_ranks(row));
  EXPECT_EQ(mesh.get_local_rank(), world.rank() % 2);
  EXPECT_EQ(mesh, DeviceMesh::from_group(row, "cpu", {.mesh = {.ranks = global_ranks(row)}}));
}

// TP-9: an array that contradicts the groups
LOCKSTEP_THREAD_TEST(FromGroup, RefusesAnArrayThatContradictsTheGroups, 4) {
  const auto groups = make_groups(world);
  const auto who = "rank " + std::to_string(world.rank()) + " of 4";
  expect_error(
      [&] {
        DeviceMesh::from_group({groups.row, groups.column}, "cpu", {.mesh = kSquare, .mesh_dim_names = {"dp", "tp"}});
      },
      {"[lockstep/mesh] ", who, "mesh dim 'dp'", "Give the array"});
  expect_error([&] { DeviceMesh::from_group(groups.row, "cpu", {.mesh = {.ranks = {0, 3}}}); },
               {"[lockstep/mesh] ", who, "mesh dim 0", "its group has"});
  expect_error([&] { DeviceMesh::from_group(groups.row, "cuda:1"); }, {"[lockstep/mesh] ", who, "'cuda:1'"});
}

// TP-6, TP-9: ranks that are not in the array pass null
LOCKSTEP_THREAD_TEST(FromGroup, TakesNullOnRanksOutside, 3) {
  const auto group = new_group(world.group(), {2, 0});
  const auto mesh = DeviceMesh::from_group(group, "cpu", {.mesh = {.ranks = {2, 0}}});
  EXPECT_EQ(mesh.is_member(), world.rank() != 1);
  EXPECT_EQ(mesh.get_rank(), world.rank());
  if (mesh.is_member()) {
    EXPECT_EQ(mesh.get_local_rank(), world.rank() == 2 ? 0 : 1);
  }
  if (world.rank() == 0) {
    expect_error([&] { DeviceMesh::from_group(GroupPtr(), "cpu", {.mesh = {.ranks = {2, 0}}}); },
                 {"[lockstep/mesh] ", "rank 0 of 3", "(2, 0)", "but its group has ()"});
  }
}

}  // namespace
}  // namespace lockstep
