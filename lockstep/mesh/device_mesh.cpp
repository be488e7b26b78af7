#include "lockstep/mesh/device_mesh.h"

#include <algorithm>
#include <ostream>
#include <set>

#include "lockstep/base/str.h"
#include "lockstep/comm/agreement.h"
#include "lockstep/mesh/mesh_state.h"

namespace lockstep {
namespace {

/// Python's spelling of a tuple: "(2, 4)", "(2,)".
std::string tuple_text(const std::vector<std::string>& items) {
  return str("(", join(items, ", "), items.size() == 1 ? ",)" : ")");
}

std::optional<std::size_t> index_of(const std::vector<std::string>& names, const std::string& name) {
  const auto found = std::find(names.begin(), names.end(), name);
  if (found == names.end()) return std::nullopt;
  return found - names.begin();
}

std::string text_of(const DeviceMesh::State& state) {
  std::vector<std::string> sizes;
  std::vector<std::string> strides;
  for (std::size_t i = 0; i < state.layout.axes().size(); ++i) {
    const auto& axis = state.layout.axes()[i];
    sizes.push_back(state.names.empty() ? str(axis.size()) : str(state.names[i], "=", axis.size()));
    strides.push_back(axis.stride_text());
  }
  // Named sizes are no tuple in Python's text, so they get no trailing comma.
  const auto shape = state.names.empty() ? tuple_text(sizes) : str("(", join(sizes, ", "), ")");
  return str("DeviceMesh(", shape, ", '", state.root->device_type, "', stride=", tuple_text(strides), ")");
}

}  // namespace

std::optional<DeviceMesh::Root::Flattened> DeviceMesh::Root::find_flattened(const std::string& name) {
  const std::lock_guard lock(mutex);
  const auto found = flattened.find(name);
  if (found == flattened.end()) return std::nullopt;
  return found->second;
}

std::string DeviceMesh::Root::who() const {
  return world ? str("rank ", rank, " of ", world->world_size()) : str("rank ", rank);
}

DeviceMesh::State::State(std::shared_ptr<Root> root, MeshLayout layout, std::vector<std::string> names,
                         std::vector<GroupPtr> groups)
    : root(std::move(root)), layout(std::move(layout)), names(std::move(names)), groups(std::move(groups)) {
  const auto copies = tile(this->layout.flattened(), this->root->ranks);
  for (const auto& copy : copies) {
    const bool is_mine = std::find(copy.begin(), copy.end(), this->root->rank) != copy.end();
    if (is_mine || copies.size() == 1) ranks = copy;
  }
  coordinate = coordinate_of(this->root->rank);
}

std::optional<std::vector<int>> DeviceMesh::State::coordinate_of(int rank) const {
  for (const auto& copy : tile(layout.flattened(), root->ranks)) {
    const auto found = std::find(copy.begin(), copy.end(), rank);
    if (found != copy.end()) return unravel(found - copy.begin(), layout.shape());
  }
  return std::nullopt;
}

std::string DeviceMesh::State::where() const {
  return str("[lockstep/mesh] ", root->who(), ", ", text_of(*this), ": ");
}

std::size_t DeviceMesh::State::axis(int64_t mesh_dim) const {
  const auto ndim = layout.ndim();
  TORCH_CHECK(mesh_dim >= -ndim && mesh_dim < ndim, where(), "there is no mesh dim ", mesh_dim, ". Give one from ",
              -ndim, " to ", ndim - 1, ".");
  return mesh_dim < 0 ? mesh_dim + ndim : mesh_dim;
}

std::string DeviceMesh::State::valid_names(bool has_flattened) const {
  auto known = names;
  if (!has_flattened) return join(known, ", ");
  const std::lock_guard lock(root->mutex);
  for (const auto& [name, entry] : root->flattened) known.push_back(name);
  return join(known, ", ");
}

GroupPtr DeviceMesh::State::group_of(const std::string& name, const AxisLayout& axis, const char* function,
                                     const GroupOptions& options) const {
  const auto known = root->find_flattened(name);
  TORCH_CHECK(!known || known->axis == axis, where(), function, "() cannot name an axis '", name,
              "': the name stands for other axes, with stride ", known->axis.stride_text(), " and size ",
              known->axis.size(), ". Choose another.");
  if (known) return known->group;
  const auto& world = root->world;
  const bool is_in_world = world && world->rank() == root->rank &&
                           *std::max_element(root->ranks.begin(), root->ranks.end()) < world->world_size();
  TORCH_CHECK(is_in_world, where(), function, "() makes groups from the world's, but the mesh is not of its ranks. ",
              "Call lockstep::init() before you make the mesh.");
  check_same_on_all_ranks(str("the axes and name of DeviceMesh::", function, "()"),
                          str(text_of(*this), " to '", name, "'"), world->group());
  const bool is_own = !options.backend.empty() || options.timeout.count() > 0;
  auto group = detail::make_axis_group(*world, axis, root->ranks, is_own ? &options : nullptr);
  const std::lock_guard lock(root->mutex);
  root->flattened.emplace(name, Root::Flattened{axis, group});
  return group;
}

bool DeviceMesh::State::is_root() const {
  return layout == root->layout && names == root->names;
}

namespace detail {

GroupPtr make_axis_group(const World& world, const AxisLayout& axis, const std::vector<int>& ranks,
                         const GroupOptions* override) {
  const auto lists = tile(axis, ranks);
  if (override == nullptr && lists.size() == 1 && lists[0] == global_ranks(world.group())) return world.group();
  return new_subgroups(world.group(), lists, override != nullptr ? *override : GroupOptions{});
}

}  // namespace detail

DeviceMesh::DeviceMesh(const std::shared_ptr<Root>& root)
    : state_(std::make_shared<State>(root, root->layout, root->names, root->groups)) {}

int64_t DeviceMesh::ndim() const {
  return state_->layout.ndim();
}

std::vector<int64_t> DeviceMesh::shape() const {
  return state_->layout.shape();
}

int64_t DeviceMesh::size() const {
  return state_->layout.size();
}

int64_t DeviceMesh::size(int64_t mesh_dim) const {
  return state_->layout.axes()[state_->axis(mesh_dim)].size();
}

const std::vector<std::string>& DeviceMesh::mesh_dim_names() const {
  return state_->names;
}

const std::string& DeviceMesh::device_type() const {
  return state_->root->device_type;
}

const MeshLayout& DeviceMesh::layout() const {
  return state_->layout;
}

int DeviceMesh::get_rank() const {
  return state_->root->rank;
}

const std::vector<int>& DeviceMesh::ranks() const {
  return state_->ranks;
}

bool DeviceMesh::is_member() const {
  return state_->coordinate.has_value();
}

const std::optional<std::vector<int>>& DeviceMesh::get_coordinate() const {
  return state_->coordinate;
}

std::optional<std::vector<int>> DeviceMesh::coordinate_of(int rank) const {
  return state_->coordinate_of(rank);
}

GroupPtr DeviceMesh::get_group() const {
  TORCH_CHECK(ndim() == 1, state_->where(), "has ", ndim(),
              " mesh dims, so say which: get_group(0), a name, or get_all_groups().");
  return get_group(0);
}

GroupPtr DeviceMesh::get_group(int64_t mesh_dim) const {
  const auto axis = state_->axis(mesh_dim);
  TORCH_CHECK(is_member(), state_->where(), "this rank is outside the mesh, so it has no group along mesh dim ",
              mesh_dim, ". Ask is_member() first.");
  return state_->groups[axis];
}

GroupPtr DeviceMesh::get_group(const std::string& mesh_dim) const {
  if (const auto axis = index_of(state_->names, mesh_dim)) return get_group(static_cast<int64_t>(*axis));
  const auto flattened = state_->root->find_flattened(mesh_dim);
  TORCH_CHECK(flattened, state_->where(), "there is no mesh dim '", mesh_dim, "'. ",
              state_->names.empty() ? "The mesh has no names: use an index, or give mesh_dim_names."
                                    : str("Valid names: ", state_->valid_names(true), "."));
  TORCH_CHECK(is_member(), state_->where(), "this rank is outside the mesh, so it has no group along mesh dim '",
              mesh_dim, "'. Ask is_member() first.");
  return flattened->group;
}

const std::vector<GroupPtr>& DeviceMesh::get_all_groups() const {
  return state_->groups;
}

int DeviceMesh::get_local_rank() const {
  TORCH_CHECK(ndim() == 1, state_->where(), "has ", ndim(), " mesh dims, so say which: get_local_rank(0) or a name.");
  return get_local_rank(0);
}

int DeviceMesh::get_local_rank(int64_t mesh_dim) const {
  return get_group(mesh_dim)->getRank();
}

int DeviceMesh::get_local_rank(const std::string& mesh_dim) const {
  return get_group(mesh_dim)->getRank();
}

DeviceMesh DeviceMesh::slice(const std::vector<std::string>& mesh_dim_names) const {
  const auto& state = *state_;
  TORCH_CHECK(!state.names.empty(), state.where(), "cannot be sliced: its axes have no names. Give mesh_dim_names.");
  TORCH_CHECK(!mesh_dim_names.empty(), state.where(),
              "a slice needs at least one name. Valid names: ", state.valid_names(state.is_root()), ".");
  const auto wanted = join(mesh_dim_names, ", ");
  std::vector<AxisLayout> axes;
  std::vector<GroupPtr> groups;
  std::vector<std::size_t> order;
  for (const auto& name : mesh_dim_names) {
    if (const auto axis = index_of(state.names, name)) {
      order.push_back(*axis);
      axes.push_back(state.layout.axes()[*axis]);
      if (is_member()) groups.push_back(state.groups[*axis]);
      continue;
    }
    const auto flattened = state.is_root() ? state.root->find_flattened(name) : std::nullopt;
    TORCH_CHECK(flattened, state.where(), "there is no mesh dim '", name,
                "'. Valid names: ", state.valid_names(state.is_root()), ".");
    axes.push_back(flattened->axis);
    if (is_member()) groups.push_back(flattened->group);
  }
  const MeshLayout layout(std::move(axes));
  TORCH_CHECK(
      std::set(mesh_dim_names.begin(), mesh_dim_names.end()).size() == mesh_dim_names.size() && !layout.overlaps(),
      state.where(), "the slice (", wanted, ") holds an axis twice. Name each axis once.");
  // A flattened axis has no index of its own: its strides tell its place among the others.
  const bool is_ordered = order.size() == mesh_dim_names.size() ? std::is_sorted(order.begin(), order.end())
                                                                : layout.flattened().is_sorted();
  TORCH_CHECK(is_ordered, state.where(), "the slice (", wanted,
              ") is not in the order of the mesh: ", state.valid_names(state.is_root()),
              ". Keep that order, or use concatenate().");
  return DeviceMesh(std::make_shared<State>(state.root, layout, mesh_dim_names, std::move(groups)));
}

DeviceMesh DeviceMesh::operator[](const std::string& mesh_dim_name) const {
  return slice({mesh_dim_name});
}

DeviceMesh DeviceMesh::flatten(const std::string& mesh_dim_name, const GroupOptions& options) const {
  const auto& state = *state_;
  auto& root = *state.root;
  TORCH_CHECK(!state.names.empty(), state.where(), "cannot be flattened: its axes have no names. Give mesh_dim_names.");
  const auto name = mesh_dim_name.empty() ? join(state.names, "_") : mesh_dim_name;
  if (ndim() == 1 && name == state.names[0]) return *this;
  TORCH_CHECK(!index_of(root.names, name), state.where(), "cannot be flattened to '", name,
              "': the root mesh has an axis of that name, one of ", join(root.names, ", "), ". Choose another.");

  const auto axis = state.layout.flattened();
  std::vector<GroupPtr> groups;
  const auto group = state.group_of(name, axis, "flatten", options);
  if (is_member()) groups.push_back(group);
  return DeviceMesh(std::make_shared<State>(state.root, MeshLayout({axis}), std::vector{name}, std::move(groups)));
}

DeviceMesh DeviceMesh::with_axis_of_one(const std::string& mesh_dim_name) const {
  const auto& state = *state_;
  TORCH_CHECK(
      !state.names.empty() && !index_of(state.names, mesh_dim_name) && !index_of(state.root->names, mesh_dim_name),
      state.where(), "cannot get an axis '", mesh_dim_name,
      "': its axes have no names, or one of the mesh or of its root has this one. Choose another.");
  auto axes = state.layout.axes();
  auto names = state.names;
  auto groups = state.groups;
  const auto group = state.group_of(mesh_dim_name, AxisLayout(), "with_axis_of_one", {});
  axes.emplace_back();
  names.push_back(mesh_dim_name);
  if (is_member()) groups.push_back(group);
  return DeviceMesh(
      std::make_shared<State>(state.root, MeshLayout(std::move(axes)), std::move(names), std::move(groups)));
}

DeviceMesh DeviceMesh::concatenate(const std::vector<DeviceMesh>& meshes) {
  TORCH_CHECK(!meshes.empty(), "[lockstep/mesh] concatenate() needs at least one mesh.");
  const auto& first = *meshes[0].state_;
  std::vector<AxisLayout> axes;
  std::vector<std::string> names;
  std::vector<GroupPtr> groups;
  for (const auto& mesh : meshes) {
    const auto& state = *mesh.state_;
    TORCH_CHECK(state.root == first.root, first.where(), "cannot be concatenated with ", mesh,
                ": they were cut from different meshes. Slice both from one.");
    TORCH_CHECK(!state.names.empty(), state.where(),
                "cannot be concatenated: its axes have no names. Give mesh_dim_names.");
    axes.insert(axes.end(), state.layout.axes().begin(), state.layout.axes().end());
    names.insert(names.end(), state.names.begin(), state.names.end());
    groups.insert(groups.end(), state.groups.begin(), state.groups.end());
  }
  const MeshLayout layout(std::move(axes));
  TORCH_CHECK(std::set(names.begin(), names.end()).size() == names.size() && !layout.overlaps(), "[lockstep/mesh] ",
              first.root->who(), ": cannot concatenate ", join(meshes, " and "),
              ": they overlap in an axis. Give meshes that share none.");
  return DeviceMesh(std::make_shared<State>(first.root, layout, std::move(names), std::move(groups)));
}

DeviceMesh DeviceMesh::get_root_mesh() const {
  return DeviceMesh(state_->root);
}

std::string DeviceMesh::to_string() const {
  return text_of(*state_);
}

bool DeviceMesh::operator==(const DeviceMesh& other) const {
  const auto& root = *state_->root;
  const auto& their_root = *other.state_->root;
  return state_ == other.state_ || (root.ranks == their_root.ranks && state_->layout == other.state_->layout &&
                                    root.device_type == their_root.device_type &&
                                    state_->names == other.state_->names && root.owner == their_root.owner);
}

std::ostream& operator<<(std::ostream& out, const DeviceMesh& mesh) {
  return out << mesh.to_string();
}

}  // namespace lockstep
