// What a DeviceMesh is made of. Internal to mesh.
#pragma once

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "lockstep/base/rank_local.h"
#include "lockstep/comm/world.h"
#include "lockstep/mesh/device_mesh.h"

namespace lockstep {

/// What all meshes cut from one mesh share.
struct DeviceMesh::Root {
  struct Flattened {
    AxisLayout axis;
    GroupPtr group;
  };

  // Fixed after construction.
  std::optional<World> world;  // none if the groups came from elsewhere and nobody called init()
  int rank = 0;
  std::string device_type;
  std::vector<int> ranks;
  MeshLayout layout;
  std::vector<std::string> names;
  std::vector<GroupPtr> groups;
  const RankScope* owner = &RankScope::current();

  // Guarded by mutex. Holds groups, not meshes: those would keep the root alive for ever.
  std::mutex mutex = {};
  std::map<std::string, Flattened> flattened = {};

  std::optional<Flattened> find_flattened(const std::string& name);
  /// "rank 1 of 4", for messages.
  std::string who() const;
};

struct DeviceMesh::State {
  State(std::shared_ptr<Root> root, MeshLayout layout, std::vector<std::string> names, std::vector<GroupPtr> groups);

  const std::shared_ptr<Root> root;
  const MeshLayout layout;
  const std::vector<std::string> names;
  const std::vector<GroupPtr> groups;  // by axis; empty if this rank is outside
  std::vector<int> ranks;
  std::optional<std::vector<int>> coordinate;

  std::optional<std::vector<int>> coordinate_of(int rank) const;
  /// "[lockstep/mesh] rank 1 of 4, DeviceMesh(…): ", the beginning of every message about this mesh.
  std::string where() const;
  /// Index of an axis; refuses what is out of range.
  std::size_t axis(int64_t mesh_dim) const;
  /// "dp, tp": own names, followed by those of flattened axes where these count.
  std::string valid_names(bool has_flattened) const;
  bool is_root() const;
  /// This rank's group along an axis that the root knows by `name`, made at its first use, which is collective over the
  /// world. Refuses a name that stands for another axis.
  GroupPtr group_of(const std::string& name, const AxisLayout& axis, const char* function,
                    const GroupOptions& options) const;
};

namespace detail {

/// This rank's group along `axis` of a mesh over `ranks`. Collective over the world. The world's own group serves where
/// the axis holds all its ranks in order and `override` is null.
GroupPtr make_axis_group(const World& world, const AxisLayout& axis, const std::vector<int>& ranks,
                         const GroupOptions* override);

}  // namespace detail
}  // namespace lockstep
