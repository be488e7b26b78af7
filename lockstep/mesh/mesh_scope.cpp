#include "lockstep/mesh/mesh_scope.h"

#include <mutex>

#include "lockstep/base/rank_local.h"
#include "lockstep/base/str.h"
#include "lockstep/comm/world.h"

namespace lockstep {

namespace detail {

struct MeshScopes {
  // Guarded by mutex: a rank may have several threads. Each scope takes out its own entry, whatever came after it.
  std::mutex mutex;
  std::list<DeviceMesh> meshes;
};

}  // namespace detail

MeshScope::MeshScope(DeviceMesh mesh) : scopes_(rank_local<detail::MeshScopes>()) {
  const std::lock_guard lock(scopes_.mutex);
  mine_ = scopes_.meshes.insert(scopes_.meshes.end(), std::move(mesh));
}

MeshScope::~MeshScope() {
  // The mesh may hold the last reference to its groups: they must not end under the lock.
  std::list<DeviceMesh> mine;
  const std::lock_guard lock(scopes_.mutex);
  mine.splice(mine.begin(), scopes_.meshes, mine_);
}

DeviceMesh current_mesh() {
  auto& scopes = rank_local<detail::MeshScopes>();
  const std::lock_guard lock(scopes.mutex);
  if (!scopes.meshes.empty()) return scopes.meshes.back();
  const auto world = current_world();
  TORCH_CHECK(false, "[lockstep/mesh] ", world ? str("rank ", world->rank(), " of ", world->world_size(), ": ") : "",
              "no mesh was passed and none is current. Pass a DeviceMesh, or keep a MeshScope around the call.");
}

DeviceMesh mesh_or_current(const std::optional<DeviceMesh>& mesh) {
  return mesh ? *mesh : current_mesh();
}

}  // namespace lockstep
