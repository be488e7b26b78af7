// What a mesh does with one rank, or with pretend groups of many.
#include "lockstep/mesh/device_mesh.h"

#include "lockstep/comm/fake/fake_backend.h"
#include "lockstep/comm/world.h"
#include "lockstep/mesh/mesh_scope.h"
#include "lockstep/testing/gtest.h"

namespace lockstep {
namespace {

using lockstep::testing::expect_error;

// TP-1: opens a default group if needed, and keeps it
TEST(DeviceMesh, OpensAWorldAndKeepsIt) {
  ASSERT_FALSE(current_world());
  {
    auto mesh = std::make_optional(init_device_mesh("cpu", {1, 1}, {.mesh_dim_names = {"dp", "tp"}}));
    ASSERT_TRUE(current_world());
    EXPECT_EQ(mesh->get_group("tp"), default_group());
    const auto slice = (*mesh)["dp"];
    mesh.reset();
    EXPECT_TRUE(current_world());
  }
  EXPECT_FALSE(current_world());
}

// TP-1: an index is refused, before any world is opened
TEST(DeviceMesh, RefusesADeviceInPlaceOfAKind) {
  expect_error([] { init_device_mesh("cuda:0", {1}); }, {"[lockstep/mesh] ", "'cuda:0'", "'cuda'"});
  expect_error([] { init_device_mesh("toaster", {1}); }, {"[lockstep/mesh] ", "'toaster'", "'cpu'"});
  expect_error([] { init_device_mesh("", {1}); }, {"[lockstep/mesh] ", "kind of device"});
  EXPECT_FALSE(current_world());
}

// TP-1: names are unique and one per axis
TEST(DeviceMesh, RefusesNamesThatDoNotFit) {
  expect_error([] { init_device_mesh("cpu", {1, 1}, {.mesh_dim_names = {"dp", "dp"}}); },
               {"[lockstep/mesh] ", "mesh_dim_names", "'dp' twice"});
  expect_error([] { init_device_mesh("cpu", {1, 1}, {.mesh_dim_names = {"dp"}}); },
               {"[lockstep/mesh] ", "mesh_dim_names", "1 names", "2 dims"});
  expect_error([] { init_device_mesh("cpu", {1, 1}, {.mesh_dim_names = {"dp", ""}}); },
               {"[lockstep/mesh] ", "mesh_dim_names", "empty"});
}

// TP-1: shapes without ranks
TEST(DeviceMesh, RefusesAShapeWithoutRanks) {
  expect_error([] { init_device_mesh("cpu", {}); }, {"[lockstep/mesh] ", "shape ()"});
  expect_error([] { init_device_mesh("cpu", {2, 0}); }, {"[lockstep/mesh] ", "shape (2, 0)", "at least 1"});
  expect_error([] { init_device_mesh("cpu", {-1, -4}); }, {"[lockstep/mesh] ", "shape (-1, -4)"});
  expect_error([] { init_device_mesh("cpu", {1 << 20, 1 << 20, 1 << 20}); }, {"[lockstep/mesh] ", "shape (1048576"});
}

// TP-2: what an array of ranks cannot be
TEST(DeviceMesh, RefusesAnArrayThatMakesNoSense) {
  expect_error([] { DeviceMesh::from_ranks("cpu", {.ranks = {0, 1, 0}}); }, {"[lockstep/mesh] ", "rank 0 twice"});
  expect_error([] { DeviceMesh::from_ranks("cpu", {.ranks = {0, -1}}); }, {"[lockstep/mesh] ", "rank -1"});
  expect_error([] { DeviceMesh::from_ranks("cpu", {.ranks = {0, 1, 2}, .shape = {2, 2}}); },
               {"[lockstep/mesh] ", "shape (2, 2)", "3 ranks"});
  expect_error([] { DeviceMesh::from_ranks("cpu", {}); }, {"[lockstep/mesh] ", "0 ranks"});
}

// TP-4: overrides by index or name, not both, and only of axes that exist
TEST(DeviceMesh, RefusesOverridesThatDoNotFit) {
  const auto make = [](auto overrides) {
    init_device_mesh("cpu", {1, 1}, {.mesh_dim_names = {"dp", "tp"}, .backend_override = overrides});
  };
  using Overrides = decltype(MeshOptions::backend_override);
  expect_error([&] { make(Overrides{{1, {.backend = "gloo"}}, {"tp", {.backend = "gloo"}}}); },
               {"[lockstep/mesh] ", "mesh dim 1", "'tp'", "Keep one"});
  expect_error([&] { make(Overrides{{"pp", {.backend = "gloo"}}}); }, {"[lockstep/mesh] ", "pp", "dp, tp"});
  expect_error([&] { make(Overrides{{2, {.backend = "gloo"}}}); }, {"[lockstep/mesh] ", "mesh dim 2", "0 to 1"});
  expect_error([&] { make(Overrides{{-1, {.backend = "gloo"}}}); }, {"[lockstep/mesh] ", "mesh dim -1"});
  expect_error([&] { make(Overrides{{0, {.backend = "pigeon"}}}); }, {"pigeon"});
  EXPECT_FALSE(current_world());
}

// TP-9: one group needs nothing else
TEST(DeviceMesh, TakesOneGroupAsItIs) {
  const auto fake = make_fake_group(5, 8);
  const auto mesh = DeviceMesh::from_group(fake.group, "cpu", {.mesh_dim_names = {"tp"}});
  EXPECT_EQ(mesh.shape(), std::vector<int64_t>{8});
  EXPECT_EQ(mesh.get_rank(), 5);
  EXPECT_EQ(mesh.get_coordinate(), std::vector<int>{5});
  EXPECT_EQ(mesh.get_group(), fake.group);
  EXPECT_EQ(mesh["tp"].get_local_rank(), 5);
  EXPECT_TRUE(fake.backend->calls().empty());
}

// TP-9: the array must be the group's
TEST(DeviceMesh, RefusesAnArrayThatContradictsTheGroup) {
  const auto fake = make_fake_group(1, 2);
  expect_error([&] { DeviceMesh::from_group(fake.group, "cpu", {.mesh = {.ranks = {1, 0}}}); },
               {"[lockstep/mesh] ", "mesh dim 0", "rank 1", "(1, 0)", "(0, 1)"});
  expect_error([&] { DeviceMesh::from_group(fake.group, "cpu", {.mesh = {.ranks = {0, 1, 2}}}); },
               {"[lockstep/mesh] ", "(0, 1, 2)", "(0, 1)"});
  expect_error([&] { DeviceMesh::from_group(fake.group, "cpu", {.mesh = {.ranks = {0, 1}, .shape = {1, 2}}}); },
               {"[lockstep/mesh] ", "1 groups", "2 dims"});
}

// TP-9: several groups need an array and names
TEST(DeviceMesh, RefusesSeveralGroupsWithoutArrayOrNames) {
  const auto a = make_fake_group(0, 2).group;
  const auto b = make_fake_group(0, 2).group;
  const RankArray array{.ranks = {0, 1, 2, 3}, .shape = {2, 2}};
  expect_error([&] { DeviceMesh::from_group({a, b}, "cpu", {.mesh_dim_names = {"dp", "tp"}}); },
               {"[lockstep/mesh] ", "mesh"});
  expect_error([&] { DeviceMesh::from_group({a, b}, "cpu", {.mesh = array}); }, {"[lockstep/mesh] ", "mesh_dim_names"});
  expect_error([&] { DeviceMesh::from_group({a, b}, "cpu", {.mesh = array, .mesh_dim_names = {"dp"}}); },
               {"[lockstep/mesh] ", "1 names", "2 dims"});
  // The pretend groups both hold ranks 0 and 1, which cannot be a row and a column at once.
  expect_error([&] { DeviceMesh::from_group({a, b}, "cpu", {.mesh = array, .mesh_dim_names = {"dp", "tp"}}); },
               {"[lockstep/mesh] ", "mesh dim 'dp'", "(0, 2)", "(0, 1)"});
  expect_error([&] { DeviceMesh::from_group(std::vector<GroupPtr>{}, "cpu"); },
               {"[lockstep/mesh] ", "at least one group"});
  expect_error([&] { DeviceMesh::from_group(GroupPtr(), "cpu"); }, {"[lockstep/mesh] ", "no group"});
}

// TP-8: groups are made from the world's, which a mesh over foreign groups may not have
TEST(DeviceMesh, RefusesToFlattenWithoutAWorld) {
  const auto mesh = DeviceMesh::from_group(make_fake_group(0, 4).group, "cpu", {.mesh_dim_names = {"tp"}});
  expect_error([&] { mesh.flatten("all"); }, {"[lockstep/mesh] ", "rank 0", "tp=4", "lockstep::init()"});
}

// TP-10: names, sizes and strides, as in Python
TEST(DeviceMesh, PrintsNamesSizesAndStrides) {
  const auto group = make_fake_group(0, 4).group;
  EXPECT_EQ(DeviceMesh::from_group(group, "cpu").to_string(), "DeviceMesh((4,), 'cpu', stride=(1,))");
  EXPECT_EQ(DeviceMesh::from_group(group, "cuda", {.mesh_dim_names = {"tp"}}).to_string(),
            "DeviceMesh((tp=4), 'cuda', stride=(1,))");
}

// TP-10: what makes two meshes different
TEST(DeviceMesh, ComparesRanksKindAndNames) {
  const auto four = make_fake_group(0, 4).group;
  const auto mesh = DeviceMesh::from_group(four, "cpu", {.mesh_dim_names = {"tp"}});
  EXPECT_EQ(mesh, DeviceMesh::from_group(make_fake_group(0, 4).group, "cpu", {.mesh_dim_names = {"tp"}}));
  EXPECT_NE(mesh, DeviceMesh::from_group(four, "cpu", {.mesh_dim_names = {"dp"}}));
  EXPECT_NE(mesh, DeviceMesh::from_group(four, "cpu"));
  EXPECT_NE(mesh, DeviceMesh::from_group(four, "cuda", {.mesh_dim_names = {"tp"}}));
  EXPECT_NE(mesh, DeviceMesh::from_group(make_fake_group(0, 2).group, "cpu", {.mesh_dim_names = {"tp"}}));
}

// TP-11: the innermost scope, and the one around it afterwards
TEST(MeshScope, GivesTheInnermostMesh) {
  const auto outer = DeviceMesh::from_group(make_fake_group(0, 4).group, "cpu");
  const auto inner = DeviceMesh::from_group(make_fake_group(0, 2).group, "cpu");
  {
    const MeshScope outer_scope(outer);
    EXPECT_EQ(current_mesh(), outer);
    {
      const MeshScope inner_scope(inner);
      EXPECT_EQ(current_mesh(), inner);
      EXPECT_EQ(mesh_or_current(std::nullopt), inner);
      EXPECT_EQ(mesh_or_current(outer), outer);
    }
    EXPECT_EQ(current_mesh(), outer);
  }
  expect_error([] { current_mesh(); }, {"[lockstep/mesh] ", "MeshScope"});
}

// TP-11: neither mesh nor scope
TEST(MeshScope, RefusesWithoutMeshAndScope) {
  expect_error([] { mesh_or_current(std::nullopt); },
               {"[lockstep/mesh] ", "no mesh was passed", "Pass a DeviceMesh", "MeshScope"});
}

}  // namespace
}  // namespace lockstep
