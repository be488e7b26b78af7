// Meshes cut from meshes: slices, flattened axes, concatenations.
#include <algorithm>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/objects.h"
#include "lockstep/comm/world.h"
#include "lockstep/mesh/device_mesh.h"
#include "lockstep/testing/gtest.h"
#include "lockstep/testing/recorder.h"

namespace lockstep {
namespace {

using lockstep::testing::expect_error;
using Ranks = std::vector<int>;

DeviceMesh make_cube() {
  return init_device_mesh("cpu", {2, 2, 2}, {.mesh_dim_names = {"dp", "cp", "tp"}});
}

/// How many groups were made from the world's so far: a new one is numbered after them.
std::string next_group_name(const World& world) {
  return group_name(new_group(world.group(), {world.rank()}));
}

// TP-7: the parent's groups, no new communicator, no communication
LOCKSTEP_THREAD_TEST(MeshSlice, SharesTheGroupsOfItsParent, 8) {
  const auto mesh = make_cube();
  const testing::Recorder recorder;
  const auto tp = mesh["tp"];
  const auto dp_tp = mesh.slice({"dp", "tp"});
  EXPECT_TRUE(recorder.events().empty());
  EXPECT_EQ(tp.get_group(), mesh.get_group("tp"));
  EXPECT_EQ(dp_tp.get_all_groups(), (std::vector<GroupPtr>{mesh.get_group("dp"), mesh.get_group("tp")}));
  EXPECT_EQ(dp_tp["tp"].get_group(), mesh.get_group("tp"));
}

// TP-7: the ranks of the slice this rank is in
LOCKSTEP_THREAD_TEST(MeshSlice, HoldsTheRanksAroundThisOne, 8) {
  const auto mesh = make_cube();
  const int cp = world.rank() / 2 % 2;
  const auto dp_tp = mesh.slice({"dp", "tp"});
  EXPECT_EQ(dp_tp.shape(), (std::vector<int64_t>{2, 2}));
  EXPECT_EQ(dp_tp.mesh_dim_names(), (std::vector<std::string>{"dp", "tp"}));
  EXPECT_EQ(dp_tp.ranks(), (Ranks{2 * cp, 2 * cp + 1, 2 * cp + 4, 2 * cp + 5}));
  EXPECT_EQ(dp_tp.get_coordinate(), (Ranks{world.rank() / 4, world.rank() % 2}));
  EXPECT_EQ(mesh["cp"].ranks(), (Ranks{world.rank() & ~2, world.rank() | 2}));
  EXPECT_EQ(mesh["cp"].get_local_rank(), cp);
}

// TP-7, TP-10: a slice of all axes is the mesh, and a slice knows where it was cut from
LOCKSTEP_THREAD_TEST(MeshSlice, OfAllAxesEqualsTheMesh, 8) {
  const auto mesh = make_cube();
  EXPECT_EQ(mesh.slice({"dp", "cp", "tp"}), mesh);
  EXPECT_EQ(mesh["tp"], mesh.slice({"cp", "tp"})["tp"]);
  EXPECT_NE(mesh["tp"], mesh["cp"]);
  EXPECT_EQ(mesh["tp"].get_root_mesh(), mesh);
  EXPECT_EQ(mesh["tp"].get_root_mesh().get_group("dp"), mesh.get_group("dp"));
}

// TP-7: names must exist, once, in the order of the mesh; without names there is no slice
LOCKSTEP_THREAD_TEST(MeshSlice, RefusesNamesThatAreNoSlice, 4) {
  const auto who = "rank " + std::to_string(world.rank()) + " of 4";
  const auto mesh = init_device_mesh("cpu", {2, 2}, {.mesh_dim_names = {"dp", "tp"}});
  expect_error([&] { mesh["pp"]; }, {"[lockstep/mesh] ", who, "'pp'", "Valid names: dp, tp"});
  expect_error([&] { mesh.slice({"tp", "dp"}); }, {"[lockstep/mesh] ", who, "(tp, dp)", "order", "dp, tp"});
  expect_error([&] { mesh.slice({"tp", "tp"}); }, {"[lockstep/mesh] ", who, "(tp, tp)", "twice"});
  expect_error([&] { mesh.slice({}); }, {"[lockstep/mesh] ", who, "at least one name"});
  expect_error([&] { mesh["dp"]["tp"]; }, {"[lockstep/mesh] ", who, "'tp'", "Valid names: dp."});
  const auto unnamed = init_device_mesh("cpu", {2, 2});
  expect_error([&] { unnamed["dp"]; }, {"[lockstep/mesh] ", who, "mesh_dim_names"});
}

// TP-7: order counts for axes of size 1 as well
LOCKSTEP_THREAD_TEST(MeshSlice, KeepsTheOrderOfAxesOfOne, 2) {
  const auto mesh = init_device_mesh("cpu", {1, 2}, {.mesh_dim_names = {"dp", "tp"}});
  expect_error([&] { mesh.slice({"tp", "dp"}); }, {"[lockstep/mesh] ", "(tp, dp)", "order"});
}

// TP-8: one new group over several axes
LOCKSTEP_RANK_TEST(MeshFlatten, MakesOneGroupOverSeveralAxes, 4) {
  const auto mesh = init_device_mesh("cpu", {2, 1, 2}, {.mesh_dim_names = {"dp", "cp", "tp"}});
  const auto flat = mesh.slice({"dp", "cp"}).flatten();
  EXPECT_EQ(flat.mesh_dim_names(), std::vector<std::string>{"dp_cp"});
  EXPECT_EQ(flat.ranks(), (Ranks{world.rank() % 2, world.rank() % 2 + 2}));
  auto tensor = at::full({1}, world.rank());
  all_reduce(tensor, flat.get_group());
  EXPECT_EQ(tensor.item<float>(), 2 * (world.rank() % 2) + 2);
}

// TP-8: axes that are not neighbours, too
LOCKSTEP_THREAD_TEST(MeshFlatten, JoinsAxesThatAreNotNeighbours, 8) {
  const auto flat = make_cube().slice({"dp", "tp"}).flatten("shard");
  const int cp = world.rank() / 2 % 2;
  const Ranks expected = {2 * cp, 2 * cp + 1, 2 * cp + 4, 2 * cp + 5};
  EXPECT_EQ(flat.ranks(), expected);
  EXPECT_EQ(global_ranks(flat.get_group()), expected);
  EXPECT_EQ(flat.get_coordinate(), Ranks{flat.get_local_rank()});
}

// TP-8: made once, kept in the root mesh, found there under its name
LOCKSTEP_THREAD_TEST(MeshFlatten, IsMadeOnceAndFoundByName, 8) {
  const auto mesh = make_cube();
  const auto flat = mesh.slice({"dp", "cp"}).flatten("data");
  const testing::Recorder recorder;
  const auto again = mesh.slice({"dp", "cp"}).flatten("data");
  EXPECT_TRUE(recorder.events().empty());
  EXPECT_EQ(again, flat);
  EXPECT_EQ(again.get_group(), flat.get_group());
  EXPECT_EQ(mesh["data"], flat);
  EXPECT_EQ(mesh["data"].get_group(), flat.get_group());
  EXPECT_EQ(mesh.get_group("data"), flat.get_group());
  EXPECT_EQ(mesh["tp"].get_group("data"), flat.get_group());
  EXPECT_EQ(mesh.get_local_rank("data"), world.rank() / 2);
  const auto both = mesh.slice({"data", "tp"});
  EXPECT_EQ(both.shape(), (std::vector<int64_t>{4, 2}));
  EXPECT_EQ(both.get_coordinate(), (Ranks{world.rank() / 2, world.rank() % 2}));
  expect_error([&] { mesh.slice({"tp", "data"}); }, {"[lockstep/mesh] ", "(tp, data)", "order"});
  expect_error([&] { mesh.slice({"data", "cp"}); }, {"[lockstep/mesh] ", "(data, cp)", "twice"});
  expect_error([&] { mesh["pp"]; }, {"[lockstep/mesh] ", "Valid names: dp, cp, tp, data"});
}

// TP-8: exactly one group call
LOCKSTEP_THREAD_TEST(MeshFlatten, MakesExactlyOneGroupCall, 8) {
  const auto mesh = make_cube();
  const auto number = [](const std::string& name) { return std::stoi(name.substr(name.find('/') + 1)); };
  const int before = number(next_group_name(world));
  mesh.slice({"dp", "cp"}).flatten();
  mesh.slice({"dp", "cp"}).flatten();
  mesh.slice({"cp", "tp"}).slice({"tp"});
  EXPECT_EQ(number(next_group_name(world)), before + 2);
}

// TP-8: all axes in order are the world, whose group serves, unless a backend is asked for
LOCKSTEP_THREAD_TEST(MeshFlatten, ReusesTheDefaultGroupForTheWholeMesh, 4) {
  const auto mesh = init_device_mesh("cpu", {2, 2}, {.mesh_dim_names = {"dp", "tp"}});
  EXPECT_EQ(mesh.flatten().get_group(), world.group());
  EXPECT_NE(mesh.flatten("own", {.backend = "threads"}).get_group(), world.group());
}

// TP-8: a flat mesh under its own name is itself
LOCKSTEP_THREAD_TEST(MeshFlatten, LeavesAFlatMeshAlone, 2) {
  const auto mesh = init_device_mesh("cpu", {2}, {.mesh_dim_names = {"dp"}});
  EXPECT_EQ(mesh.flatten(), mesh);
  EXPECT_EQ(mesh.flatten("dp").get_group(), mesh.get_group());
}

// TP-8: a name that is taken
LOCKSTEP_THREAD_TEST(MeshFlatten, RefusesANameThatMeansSomethingElse, 8) {
  const auto who = "rank " + std::to_string(world.rank()) + " of 8";
  const auto mesh = make_cube();
  mesh.slice({"dp", "cp"}).flatten("data");
  expect_error([&] { mesh.slice({"dp", "tp"}).flatten("data"); },
               {"[lockstep/mesh] ", who, "'data'", "other axes", "Choose another"});
  expect_error([&] { mesh.slice({"dp", "cp"}).flatten("tp"); }, {"[lockstep/mesh] ", who, "'tp'", "dp, cp, tp"});
  const auto unnamed = init_device_mesh("cpu", {2, 4});
  expect_error([&] { unnamed.flatten("all"); }, {"[lockstep/mesh] ", who, "mesh_dim_names"});
}

LOCKSTEP_THREAD_TEST(MeshFlatten, AddsAnAxisOfOne, 8) {
  const auto mesh = make_cube();
  const auto alone = mesh["dp"].with_axis_of_one("alone");
  EXPECT_EQ(alone.shape(), (std::vector<int64_t>{2, 1}));
  EXPECT_EQ(alone.get_group(0), mesh.get_group("dp"));
  EXPECT_EQ(alone.get_group("alone")->getSize(), 1);
  EXPECT_EQ(alone.ranks(), mesh["dp"].ranks());
  EXPECT_EQ(mesh["dp"].with_axis_of_one("alone").get_group("alone"), alone.get_group("alone")) << "made once";
  EXPECT_EQ(DeviceMesh::concatenate({alone, mesh["tp"]}).shape(), (std::vector<int64_t>{2, 1, 2}));
  expect_error([&] { mesh["dp"].with_axis_of_one("tp"); }, {"'tp'", "Choose another"});
  EXPECT_EQ(mesh["tp"].coordinate_of(world.rank() ^ 1), (Ranks{1 - world.rank() % 2}));
  EXPECT_EQ(mesh["tp"].coordinate_of(7 - world.rank()), (Ranks{1 - world.rank() % 2})) << "in another slice";
  EXPECT_EQ(mesh["tp"].coordinate_of(8), std::nullopt);
}

// TP-8: axes side by side, in any order, with the groups they have
LOCKSTEP_THREAD_TEST(MeshConcatenate, PutsAxesSideBySide, 8) {
  const auto mesh = make_cube();
  const auto data = mesh.slice({"dp", "cp"}).flatten("data");
  const auto both = DeviceMesh::concatenate({data, mesh["tp"]});
  EXPECT_EQ(both.shape(), (std::vector<int64_t>{4, 2}));
  EXPECT_EQ(both.mesh_dim_names(), (std::vector<std::string>{"data", "tp"}));
  EXPECT_EQ(both.get_all_groups(), (std::vector<GroupPtr>{data.get_group(), mesh.get_group("tp")}));
  EXPECT_EQ(both, mesh.slice({"data", "tp"}));
  const auto turned = DeviceMesh::concatenate({mesh["tp"], mesh["dp"]});
  EXPECT_EQ(turned.get_coordinate(), (Ranks{world.rank() % 2, world.rank() / 4}));
  const int base = world.rank() & 2;
  EXPECT_EQ(turned.ranks(), (Ranks{base, base + 4, base + 1, base + 5}));
}

// TP-8: same root, no overlap
LOCKSTEP_THREAD_TEST(MeshConcatenate, RefusesOtherRootsAndOverlap, 8) {
  const auto who = "rank " + std::to_string(world.rank()) + " of 8";
  const auto mesh = make_cube();
  const auto other = make_cube();
  const auto data = mesh.slice({"dp", "cp"}).flatten("data");
  expect_error([&] { DeviceMesh::concatenate({mesh["dp"], other["tp"]}); },
               {"[lockstep/mesh] ", who, "different meshes"});
  expect_error([&] { DeviceMesh::concatenate({data, mesh["cp"]}); },
               {"[lockstep/mesh] ", who, "data=4", "cp=2", "overlap"});
  expect_error([&] { DeviceMesh::concatenate({mesh["dp"], mesh["dp"]}); }, {"[lockstep/mesh] ", who, "overlap"});
  expect_error([&] { DeviceMesh::concatenate({}); }, {"[lockstep/mesh] ", "at least one"});
  const auto unnamed = init_device_mesh("cpu", {2, 4});
  expect_error([&] { DeviceMesh::concatenate({unnamed}); }, {"[lockstep/mesh] ", who, "mesh_dim_names"});
}

}  // namespace
}  // namespace lockstep
