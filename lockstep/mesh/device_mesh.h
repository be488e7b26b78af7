// DeviceMesh: the ranks of a job as an n-dimensional array with named axes, one process group per axis. See
// docs/mesh.md.
//
// What always holds: rank i of an axis's group is the rank at coordinate i of that axis, so get_local_rank() equals the
// coordinate. A rank may hold a mesh it is not part of: it has no coordinate and no groups, but takes part in making
// the groups of others.
//
// We say axis for what Python calls a dim of the mesh, and dim for a dim of a tensor; public names are Python's all the
// same.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/mesh/layout.h"

namespace lockstep {

struct MeshOptions {
  /// One per axis, all different; empty for a mesh without names, which cannot be sliced.
  std::vector<std::string> mesh_dim_names = {};
  /// Backend and timeout of the groups of some axes, by index or name: {{"tp", {.backend = "nccl"}}}. Such an axis
  /// always gets groups of its own, also where it spans the world.
  std::map<std::variant<int, std::string>, GroupOptions> backend_override = {};
};

/// Ranks of the world as a row-major array. An empty shape means one axis.
struct RankArray {
  std::vector<int> ranks = {};
  std::vector<int64_t> shape = {};
};

struct FromGroupOptions {
  /// Needed for several groups; for one it may be given to be checked.
  RankArray mesh = {};
  std::vector<std::string> mesh_dim_names = {};
};

/// Copies and meshes cut from one another share their groups, and keep the world alive that these were made from.
class DeviceMesh {
 public:
  /// A mesh of any ranks of the world. Collective over the world, members or not; otherwise as init_device_mesh().
  static DeviceMesh from_ranks(const std::string& device_type, const RankArray& mesh, const MeshOptions& options = {});

  /// A mesh over groups that exist, one per axis in order. Local. A rank that `mesh` does not hold passes null groups.
  static DeviceMesh from_group(const GroupPtr& group, const std::string& device_type,
                               const FromGroupOptions& options = {});
  static DeviceMesh from_group(const std::vector<GroupPtr>& groups, const std::string& device_type,
                               const FromGroupOptions& options = {});

  /// The axes of several meshes as one mesh, in the order given. Local: makes no group. The meshes must be cut from one
  /// mesh and share no axis.
  static DeviceMesh concatenate(const std::vector<DeviceMesh>& meshes);

  /// All local. An axis is an index, counted from the end if negative, or a name.
  int64_t ndim() const;
  std::vector<int64_t> shape() const;
  int64_t size() const;
  int64_t size(int64_t mesh_dim) const;
  const std::vector<std::string>& mesh_dim_names() const;
  const std::string& device_type() const;
  const MeshLayout& layout() const;
  /// This rank in the world.
  int get_rank() const;
  /// Ranks of the world in row-major order. Of a slice: of the one this rank is in, none on ranks outside.
  const std::vector<int>& ranks() const;
  /// This rank has a place in the mesh; ranks that have none skip what the mesh computes.
  bool is_member() const;
  /// One number per axis; none if this rank is outside.
  const std::optional<std::vector<int>>& get_coordinate() const;

  /// That of any rank of the root mesh, in the slice it is in: the same axes through other ranks. None outside of it.
  std::optional<std::vector<int>> coordinate_of(int rank) const;

  /// The group of this rank along an axis; also by the name of any flattened axis of the root mesh. Without an axis the
  /// mesh must have only one. Refused on ranks outside.
  GroupPtr get_group() const;
  GroupPtr get_group(int64_t mesh_dim) const;
  GroupPtr get_group(const std::string& mesh_dim) const;
  /// By axis; empty on ranks outside.
  const std::vector<GroupPtr>& get_all_groups() const;
  /// This rank's number in get_group().
  int get_local_rank() const;
  int get_local_rank(int64_t mesh_dim) const;
  int get_local_rank(const std::string& mesh_dim) const;

  /// Some axes of the mesh, in its order, with the groups they have. Local. The root mesh also knows its flattened
  /// axes.
  DeviceMesh slice(const std::vector<std::string>& mesh_dim_names) const;
  DeviceMesh operator[](const std::string& mesh_dim_name) const;
  DeviceMesh operator[](int) const = delete;

  /// The mesh as one axis named `mesh_dim_name`, by default the names joined by '_'. Collective over the world the
  /// first time a name is used; the result is kept in the root mesh, and given again for the same axes.
  DeviceMesh flatten(const std::string& mesh_dim_name = "", const GroupOptions& options = {}) const;

  /// The mesh with one more axis at the end, along which every rank is alone. Collective over the world the first time
  /// a name is used.
  DeviceMesh with_axis_of_one(const std::string& mesh_dim_name) const;

  /// The mesh this one was cut from; itself if from none.
  DeviceMesh get_root_mesh() const;

  /// "DeviceMesh((dp=2, tp=4), 'cpu', stride=(4, 1))", as Python prints it.
  std::string to_string() const;

  /// Same ranks, layout, device kind, names and owner: under threads-as-ranks the meshes of two ranks differ.
  bool operator==(const DeviceMesh& other) const;

  struct Root;   // internal
  struct State;  // internal

 private:
  explicit DeviceMesh(std::shared_ptr<const State> state) : state_(std::move(state)) {}
  explicit DeviceMesh(const std::shared_ptr<Root>& root);

  std::shared_ptr<const State> state_;
};

std::ostream& operator<<(std::ostream& out, const DeviceMesh& mesh);

/// A mesh of the first ranks of the world, in row-major order. Opens the world if there is none. Collective over the
/// world: all ranks pass the same arguments, which is checked. `device_type` is a kind of device, "cuda" and not
/// "cuda:0"; if this process has not chosen one of that kind, the mesh does.
DeviceMesh init_device_mesh(const std::string& device_type, const std::vector<int64_t>& mesh_shape,
                            const MeshOptions& options = {});

}  // namespace lockstep
