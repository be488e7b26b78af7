#include "lockstep/mesh/device_mesh.h"

#include <algorithm>

#include "lockstep/comm/barrier.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/objects.h"
#include "lockstep/comm/world.h"
#include "lockstep/testing/gtest.h"

namespace lockstep {
namespace {

using lockstep::testing::expect_error;
using Ranks = std::vector<int>;

// TP-1, TP-5: row-major ranks and every query
LOCKSTEP_THREAD_TEST(DeviceMesh, AnswersWhereARankIs, 6) {
  const auto mesh = init_device_mesh("cpu", {2, 3}, {.mesh_dim_names = {"dp", "tp"}});
  EXPECT_EQ(mesh.ndim(), 2);
  EXPECT_EQ(mesh.shape(), (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(mesh.size(), 6);
  EXPECT_EQ(mesh.size(0), 2);
  EXPECT_EQ(mesh.size(-1), 3);
  EXPECT_EQ(mesh.mesh_dim_names(), (std::vector<std::string>{"dp", "tp"}));
  EXPECT_EQ(mesh.device_type(), "cpu");
  EXPECT_EQ(mesh.ranks(), (Ranks{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(mesh.get_rank(), world.rank());
  EXPECT_TRUE(mesh.is_member());
  EXPECT_EQ(mesh.get_coordinate(), (Ranks{world.rank() / 3, world.rank() % 3}));
  EXPECT_EQ(mesh.get_local_rank(0), world.rank() / 3);
  EXPECT_EQ(mesh.get_local_rank("tp"), world.rank() % 3);
  EXPECT_EQ(mesh.get_local_rank(-1), world.rank() % 3);
  EXPECT_EQ(mesh.get_all_groups(), (std::vector<GroupPtr>{mesh.get_group("dp"), mesh.get_group(1)}));
}

// TP-3: ranks of each group of a 2 by 4 mesh
LOCKSTEP_THREAD_TEST(DeviceMesh, MakesOneGroupPerAxis, 8) {
  const auto mesh = init_device_mesh("cpu", {2, 4});
  const int row = world.rank() / 4;
  const int column = world.rank() % 4;
  EXPECT_EQ(global_ranks(mesh.get_group(0)), (Ranks{column, column + 4}));
  EXPECT_EQ(global_ranks(mesh.get_group(1)), (Ranks{4 * row, 4 * row + 1, 4 * row + 2, 4 * row + 3}));
}

// TP-3: all ranks make the same group calls, so a group made afterwards has one name everywhere
LOCKSTEP_THREAD_TEST(DeviceMesh, MakesTheSameGroupCallsOnAllRanks, 4) {
  const auto mesh = DeviceMesh::from_ranks("cpu", {.ranks = {3, 0, 1}, .shape = {3, 1}});
  const auto next = new_group(world.group(), {0, 1, 2, 3});
  const auto names = all_gather_object(group_name(next), world.group());
  EXPECT_EQ(std::count(names.begin(), names.end(), names[0]), 4);
}

// TP-3: the groups communicate, as threads and as processes
LOCKSTEP_RANK_TEST(DeviceMesh, SumsOverRowsAndColumns, 4) {
  const auto mesh = init_device_mesh("cpu", {2, 2});
  auto row = at::full({3}, world.rank());
  all_reduce(row, mesh.get_group(1));
  EXPECT_EQ(row[2].item<float>(), world.rank() < 2 ? 0 + 1 : 2 + 3);
  auto column = at::full({3}, world.rank());
  all_reduce(column, mesh.get_group(0));
  EXPECT_EQ(column[2].item<float>(), world.rank() % 2 == 0 ? 0 + 2 : 1 + 3);
}

// TP-3: an odd number of ranks, one of them outside
LOCKSTEP_THREAD_TEST(DeviceMesh, TakesTheFirstRanksOfTheWorld, 3) {
  const auto mesh = init_device_mesh("cpu", {2, 1});
  EXPECT_EQ(mesh.is_member(), world.rank() < 2);
  EXPECT_EQ(mesh.ranks(), (Ranks{0, 1}));
}

// TP-1: a world of one
LOCKSTEP_THREAD_TEST(DeviceMesh, HoldsOneRank, 1) {
  const auto mesh = init_device_mesh("cpu", {1});
  EXPECT_EQ(mesh.get_group(), world.group());
  EXPECT_EQ(mesh.get_coordinate(), Ranks{0});
}

// TP-4: the default group serves an axis that holds the world in order
LOCKSTEP_THREAD_TEST(DeviceMesh, ReusesTheDefaultGroup, 4) {
  const auto flat = init_device_mesh("cpu", {4});
  EXPECT_EQ(flat.get_group(), world.group());
  const auto thin = init_device_mesh("cpu", {1, 4});
  EXPECT_EQ(thin.get_group(1), world.group());
  EXPECT_NE(thin.get_group(0), world.group());
}

// TP-4: in another order it would give ranks other numbers than their coordinates
LOCKSTEP_THREAD_TEST(DeviceMesh, MakesItsOwnGroupForTheWorldInAnotherOrder, 4) {
  const auto mesh = DeviceMesh::from_ranks("cpu", {.ranks = {2, 0, 3, 1}});
  EXPECT_NE(mesh.get_group(), world.group());
  EXPECT_EQ(global_ranks(mesh.get_group()), (Ranks{2, 0, 3, 1}));
  EXPECT_EQ(mesh.get_local_rank(), (Ranks{1, 3, 0, 2})[world.rank()]);
  EXPECT_EQ(mesh.get_coordinate(), Ranks{mesh.get_local_rank()});
}

// TP-4: an override makes its own group, by index and by name
LOCKSTEP_THREAD_TEST(DeviceMesh, MakesItsOwnGroupForAnOverride, 4) {
  using namespace std::chrono_literals;
  const auto by_index = init_device_mesh("cpu", {4}, {.backend_override = {{0, {.backend = "threads"}}}});
  EXPECT_NE(by_index.get_group(), world.group());
  EXPECT_EQ(global_ranks(by_index.get_group()), (Ranks{0, 1, 2, 3}));
  const auto by_name = init_device_mesh(
      "cpu", {4, 1},
      {.mesh_dim_names = {"dp", "tp"}, .backend_override = {{"tp", {.backend = "gloo", .timeout = 7s}}}});
  EXPECT_EQ(by_name.get_group("dp"), world.group());
  EXPECT_EQ(backend_spec(by_name.get_group("tp")), "gloo");
  EXPECT_EQ(group_timeout(by_name.get_group("tp")), 7s);
}

// TP-5: without an axis only where there is one
LOCKSTEP_THREAD_TEST(DeviceMesh, AsksWhichAxis, 4) {
  const auto mesh = init_device_mesh("cpu", {2, 2}, {.mesh_dim_names = {"dp", "tp"}});
  const auto who = "rank " + std::to_string(world.rank()) + " of 4";
  expect_error([&] { mesh.get_group(); }, {"[lockstep/mesh] ", who, "dp=2, tp=2", "2 mesh dims", "get_all_groups()"});
  expect_error([&] { mesh.get_local_rank(); }, {"[lockstep/mesh] ", who, "2 mesh dims"});
}

// TP-5: an unknown axis lists the valid ones
LOCKSTEP_THREAD_TEST(DeviceMesh, ListsTheAxesThereAre, 4) {
  const auto mesh = init_device_mesh("cpu", {2, 2}, {.mesh_dim_names = {"dp", "tp"}});
  const auto who = "rank " + std::to_string(world.rank()) + " of 4";
  expect_error([&] { mesh.get_group("pp"); }, {"[lockstep/mesh] ", who, "'pp'", "Valid names: dp, tp"});
  expect_error([&] { mesh.get_local_rank("pp"); }, {"[lockstep/mesh] ", who, "'pp'", "Valid names: dp, tp"});
  expect_error([&] { mesh["dp"].get_group("tp"); }, {"[lockstep/mesh] ", who, "'tp'", "Valid names: dp."});
  expect_error([&] { mesh.get_group(2); }, {"[lockstep/mesh] ", who, "mesh dim 2", "-2 to 1"});
  expect_error([&] { mesh.size(-3); }, {"[lockstep/mesh] ", who, "mesh dim -3", "-2 to 1"});
  const auto unnamed = init_device_mesh("cpu", {2, 2});
  expect_error([&] { unnamed.get_group("tp"); }, {"[lockstep/mesh] ", who, "'tp'", "mesh_dim_names"});
}

// TP-2: larger than the world, or with ranks the world lacks
LOCKSTEP_THREAD_TEST(DeviceMesh, RefusesMoreRanksThanTheWorldHas, 2) {
  const auto who = "rank " + std::to_string(world.rank()) + " of 2";
  expect_error([] { init_device_mesh("cpu", {2, 2}); },
               {"[lockstep/mesh] ", who, "(2, 2)", "larger", "4 ranks", "world 2"});
  expect_error([] { DeviceMesh::from_ranks("cpu", {.ranks = {0, 1, 2}}); },
               {"[lockstep/mesh] ", who, "larger", "3 ranks"});
  expect_error([] { DeviceMesh::from_ranks("cpu", {.ranks = {0, 2}}); }, {"[lockstep/mesh] ", who, "rank 2", "0 to 1"});
  expect_error([] { DeviceMesh::from_ranks("cpu", {.ranks = {1, 1}}); }, {"[lockstep/mesh] ", who, "rank 1 twice"});
}

// TP-3: ranks that ask for different meshes are told, instead of waiting for each other
LOCKSTEP_THREAD_TEST(DeviceMesh, RefusesArgumentsThatDifferBetweenRanks, 2) {
  const std::vector<int64_t> shape = world.rank() == 0 ? std::vector<int64_t>{1, 2} : std::vector<int64_t>{2, 1};
  expect_error([&] { init_device_mesh("cpu", shape); }, {"device mesh", "shape", "rank 0: '1, 2'", "rank 1: '2, 1'"});
}

// TP-2, TP-6: a mesh over 2 of 4 ranks does not hang; those outside have neither coordinate nor groups
LOCKSTEP_RANK_TEST(DeviceMesh, CoversPartOfTheWorld, 4) {
  const auto mesh = DeviceMesh::from_ranks("cpu", {.ranks = {3, 1}}, {.mesh_dim_names = {"tp"}});
  auto tensor = at::ones({2});
  if (mesh.is_member()) {
    EXPECT_EQ(mesh.get_coordinate(), Ranks{world.rank() == 3 ? 0 : 1});
    EXPECT_EQ(global_ranks(mesh.get_group()), (Ranks{3, 1}));
    all_reduce(tensor, mesh.get_group());
  } else {
    EXPECT_EQ(mesh.get_coordinate(), std::nullopt);
    EXPECT_TRUE(mesh.get_all_groups().empty());
    expect_error([&] { mesh.get_group(); },
                 {"[lockstep/mesh] ", "rank " + std::to_string(world.rank()) + " of 4", "outside", "is_member()"});
    expect_error([&] { mesh.get_local_rank("tp"); }, {"[lockstep/mesh] ", "outside", "is_member()"});
  }
  EXPECT_EQ(mesh.is_member(), world.rank() % 2 == 1);
  EXPECT_EQ(mesh.ranks(), (Ranks{3, 1}));
  EXPECT_EQ(tensor[0].item<float>(), mesh.is_member() ? 2 : 1);
  all_reduce(tensor, world.group());
  EXPECT_EQ(tensor[0].item<float>(), 6);
}

// TP-6: slices and flattened axes of a mesh work on ranks outside it, too
LOCKSTEP_THREAD_TEST(DeviceMesh, CanBeSlicedByRanksOutside, 5) {
  const auto mesh = init_device_mesh("cpu", {2, 2}, {.mesh_dim_names = {"dp", "tp"}});
  const auto tp = mesh["tp"];
  const auto flat = mesh.flatten("all");
  const bool is_member = world.rank() < 4;
  EXPECT_EQ(tp.is_member(), is_member);
  EXPECT_EQ(flat.is_member(), is_member);
  EXPECT_EQ(tp.size(), 2);
  EXPECT_EQ(tp.ranks().size(), is_member ? 2U : 0U);
  EXPECT_EQ(flat.ranks(), (Ranks{0, 1, 2, 3}));
  if (!is_member) {
    EXPECT_TRUE(flat.get_all_groups().empty());
    expect_error([&] { mesh.get_group("all"); }, {"[lockstep/mesh] ", "rank 4 of 5", "'all'", "is_member()"});
  }
}

// TP-10: meshes of one rank are equal if made alike; those of two ranks are not, though all else is the same
TEST(DeviceMesh, BelongsToTheRankThatMadeIt) {
  std::vector<std::optional<DeviceMesh>> meshes(2);
  lockstep::testing::run_threads_in_gtest({.world_size = 2}, [&](const World& world) {
    meshes[world.rank()] = init_device_mesh("cpu", {2}, {.mesh_dim_names = {"dp"}});
    EXPECT_EQ(*meshes[world.rank()], init_device_mesh("cpu", {2}, {.mesh_dim_names = {"dp"}}));
    EXPECT_NE(*meshes[world.rank()], init_device_mesh("cpu", {2}, {.mesh_dim_names = {"tp"}}));
    EXPECT_NE(*meshes[world.rank()], init_device_mesh("cpu", {2, 1}, {.mesh_dim_names = {"dp", "tp"}}));
    EXPECT_NE(*meshes[world.rank()], DeviceMesh::from_ranks("cpu", {.ranks = {1, 0}}, {.mesh_dim_names = {"dp"}}));
    barrier(world.group());
    EXPECT_NE(*meshes[0], *meshes[1]);
    barrier(world.group());
    meshes[world.rank()].reset();
  });
}

// TP-10: names, sizes, strides
LOCKSTEP_THREAD_TEST(DeviceMesh, PrintsEveryAxis, 8) {
  const auto mesh = init_device_mesh("cpu", {2, 2, 2}, {.mesh_dim_names = {"dp", "cp", "tp"}});
  EXPECT_EQ(::testing::PrintToString(mesh), "DeviceMesh((dp=2, cp=2, tp=2), 'cpu', stride=(4, 2, 1))");
  EXPECT_EQ(mesh.slice({"dp", "tp"}).to_string(), "DeviceMesh((dp=2, tp=2), 'cpu', stride=(4, 1))");
  EXPECT_EQ(mesh.slice({"dp", "tp"}).flatten().to_string(), "DeviceMesh((dp_tp=4), 'cpu', stride=((4, 1),))");
  EXPECT_EQ(init_device_mesh("cpu", {2, 4}).to_string(), "DeviceMesh((2, 4), 'cpu', stride=(4, 1))");
}

}  // namespace
}  // namespace lockstep
