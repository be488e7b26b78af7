// The mesh that functions use when they are given none, while a MeshScope lives. One per rank, the innermost scope
// counts.
#pragma once

#include <list>
#include <memory>
#include <optional>

#include "lockstep/mesh/device_mesh.h"

namespace lockstep {

namespace detail {
struct MeshScopes;
}

/// Makes `mesh` the current one of the calling rank until it is destroyed. Local.
class MeshScope {
 public:
  explicit MeshScope(DeviceMesh mesh);
  ~MeshScope();
  MeshScope(const MeshScope&) = delete;
  MeshScope& operator=(const MeshScope&) = delete;

 private:
  detail::MeshScopes& scopes_;
  std::list<DeviceMesh>::iterator mine_;
};

/// The mesh of the innermost scope; refuses if there is none. Local.
DeviceMesh current_mesh();

/// `mesh` if there is one, else current_mesh(). For functions that take an optional mesh. Local.
DeviceMesh mesh_or_current(const std::optional<DeviceMesh>& mesh);

}  // namespace lockstep
