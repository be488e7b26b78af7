#include "lockstep/mesh/mesh_scope.h"

#include "lockstep/comm/barrier.h"
#include "lockstep/comm/world.h"
#include "lockstep/testing/gtest.h"

namespace lockstep {
namespace {

using lockstep::testing::expect_error;

// TP-11: every rank has a scope of its own
LOCKSTEP_THREAD_TEST(MeshScope, BelongsToOneRank, 2) {
  const auto mesh = init_device_mesh("cpu", {2});
  std::optional<MeshScope> scope;
  if (world.rank() == 0) scope.emplace(mesh);
  barrier(world.group());
  if (world.rank() == 0) {
    EXPECT_EQ(current_mesh(), mesh);
  } else {
    expect_error([] { current_mesh(); }, {"[lockstep/mesh] ", "rank 1 of 2", "MeshScope"});
    EXPECT_EQ(mesh_or_current(mesh), mesh);
  }
  barrier(world.group());
}

// TP-11: the scope keeps the mesh, and ends with an exception
LOCKSTEP_THREAD_TEST(MeshScope, EndsWithAnException, 2) {
  try {
    const MeshScope scope(init_device_mesh("cpu", {1, 2}));
    EXPECT_EQ(current_mesh().ndim(), 2);
    throw std::runtime_error("leave");
  } catch (const std::runtime_error&) {
  }
  expect_error([] { current_mesh(); }, {"[lockstep/mesh] ", "MeshScope"});
}

}  // namespace
}  // namespace lockstep
