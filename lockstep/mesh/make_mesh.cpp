// Making meshes: arguments are checked before anybody is contacted, then compared between the ranks, then groups are
// made axis by axis, so that all ranks make the same calls in the same order.
#include <algorithm>
#include <limits>
#include <numeric>
#include <set>

#include "lockstep/base/str.h"
#include "lockstep/comm/agreement.h"
#include "lockstep/comm/backend_registry.h"
#include "lockstep/mesh/device_choice.h"
#include "lockstep/mesh/mesh_state.h"

namespace lockstep {
namespace {

std::string where(const std::optional<World>& world) {
  return world ? str("[lockstep/mesh] rank ", world->rank(), " of ", world->world_size(), ": ") : "[lockstep/mesh] ";
}

void check_device_type(const std::string& device_type, const std::string& where) {
  TORCH_CHECK(device_type.find(':') == std::string::npos, where, "'", device_type,
              "' names one device, but a mesh has one per rank. Give the kind alone: '",
              device_type.substr(0, device_type.find(':')), "'.");
  bool is_known = false;
  try {
    const c10::Device parsed(device_type);
    is_known = true;
    // NOLINTNEXTLINE(bugprone-empty-catch): what follows tells the reader more
  } catch (const c10::Error&) {
  }
  TORCH_CHECK(is_known, where, "'", device_type,
              "' is no kind of device. Give 'cpu', 'cuda' or another that libtorch knows.");
}

/// Fills in the shape of a 1-D array.
RankArray checked(RankArray mesh, const std::string& where) {
  if (mesh.shape.empty()) mesh.shape = {static_cast<int64_t>(mesh.ranks.size())};
  const auto count = bounded_product(mesh.shape, std::numeric_limits<int>::max());
  TORCH_CHECK(count == static_cast<int64_t>(mesh.ranks.size()), where, "a mesh of shape (", join(mesh.shape, ", "),
              ") does not hold ", mesh.ranks.size(), " ranks. Give sizes of at least 1 whose product is that.");
  std::set<int> seen;
  for (const int rank : mesh.ranks) {
    TORCH_CHECK(rank >= 0, where, "a mesh cannot hold rank ", rank, ". Ranks start at 0.");
    TORCH_CHECK(seen.insert(rank).second, where, "the mesh holds rank ", rank, " twice. Give each rank one place.");
  }
  return mesh;
}

void check_names(const std::vector<std::string>& names, std::size_t ndim, const std::string& where) {
  if (names.empty()) return;
  TORCH_CHECK(names.size() == ndim, where, "mesh_dim_names (", join(names, ", "), ") has ", names.size(),
              " names for a mesh with ", ndim, " dims. Give one per dim.");
  std::set<std::string> seen;
  for (const auto& name : names) {
    TORCH_CHECK(!name.empty(), where, "mesh_dim_names (", join(names, ", "), ") has an empty name. Name every dim.");
    TORCH_CHECK(seen.insert(name).second, where, "mesh_dim_names (", join(names, ", "), ") names '", name,
                "' twice. Give each dim its own name.");
  }
}

/// The overrides by axis; null where there is none. They point into `options`.
std::vector<const GroupOptions*> overrides_by_axis(const MeshOptions& options, std::size_t ndim,
                                                   const std::string& where) {
  std::vector<const GroupOptions*> by_axis(ndim, nullptr);
  const auto& names = options.mesh_dim_names;
  for (const auto& [key, group] : options.backend_override) {
    const auto* name = std::get_if<std::string>(&key);
    const auto named =
        name != nullptr ? std::find(names.begin(), names.end(), *name) - names.begin() : std::get<int>(key);
    const auto axis = static_cast<std::size_t>(named);
    TORCH_CHECK(named >= 0 && axis < ndim, where, "backend_override names mesh dim ",
                name != nullptr ? *name : str(named), ", which the mesh does not have. Valid: 0 to ", ndim - 1,
                names.empty() ? "" : ", ", join(names, ", "), ".");
    TORCH_CHECK(by_axis[axis] == nullptr, where, "backend_override names mesh dim ", axis, " by index and as '",
                names[axis], "'. Keep one.");
    if (!group.backend.empty()) parse_backend_spec(group.backend);
    by_axis[axis] = &group;
  }
  return by_axis;
}

Facts facts_of(const std::string& device_type, const RankArray& mesh, const MeshOptions& options,
               const std::vector<const GroupOptions*>& overrides) {
  Facts facts = {{"device kind", device_type},
                 {"shape", join(mesh.shape, ", ")},
                 {"ranks", join(mesh.ranks, ", ")},
                 {"mesh_dim_names", join(options.mesh_dim_names, ", ")}};
  for (std::size_t i = 0; i < overrides.size(); ++i) {
    if (overrides[i] == nullptr) continue;
    facts.emplace_back(str("backend_override of mesh dim ", i),
                       str(overrides[i]->backend, ", ", overrides[i]->timeout.count(), " ms"));
  }
  return facts;
}

}  // namespace

DeviceMesh DeviceMesh::from_ranks(const std::string& device_type, const RankArray& given, const MeshOptions& options) {
  auto world = current_world();
  check_device_type(device_type, where(world));
  const auto mesh = checked(given, where(world));
  check_names(options.mesh_dim_names, mesh.shape.size(), where(world));
  const auto overrides = overrides_by_axis(options, mesh.shape.size(), where(world));

  if (!world) world = init();
  const int world_size = world->world_size();
  TORCH_CHECK(static_cast<int64_t>(mesh.ranks.size()) <= world_size, where(world), "a mesh of shape (",
              join(mesh.shape, ", "), ") is larger than the world: it has ", mesh.ranks.size(), " ranks, the world ",
              world_size, ". Start more ranks, or make it smaller.");
  const int highest = *std::max_element(mesh.ranks.begin(), mesh.ranks.end());
  TORCH_CHECK(highest < world_size, where(world), "the mesh holds rank ", highest, ", which the world does not have. ",
              "Give ranks from 0 to ", world_size - 1, ".");
  check_same_on_all_ranks("the device mesh", facts_of(device_type, mesh, options, overrides), world->group());
  detail::set_device_for_mesh(*world, device_type);

  auto layout = MeshLayout::row_major(mesh.shape);
  std::vector<GroupPtr> groups;
  for (std::size_t i = 0; i < overrides.size(); ++i) {
    groups.push_back(detail::make_axis_group(*world, layout.axes()[i], mesh.ranks, overrides[i]));
  }
  const int rank = world->rank();
  if (std::find(mesh.ranks.begin(), mesh.ranks.end(), rank) == mesh.ranks.end()) groups.clear();
  // NOLINTNEXTLINE(modernize-make-shared): make_shared takes no designated initialisers
  return DeviceMesh(std::shared_ptr<Root>(new Root{.world = world,
                                                   .rank = rank,
                                                   .device_type = device_type,
                                                   .ranks = mesh.ranks,
                                                   .layout = std::move(layout),
                                                   .names = options.mesh_dim_names,
                                                   .groups = std::move(groups)}));
}

DeviceMesh DeviceMesh::from_group(const GroupPtr& group, const std::string& device_type,
                                  const FromGroupOptions& options) {
  auto complete = options;
  if (options.mesh.ranks.empty()) {
    TORCH_CHECK(group, where(current_world()),
                "from_group() got no group. Ranks outside the mesh must say which ranks are in ", "it: give mesh.");
    complete.mesh.ranks = global_ranks(group);
  }
  return from_group(std::vector{group}, device_type, complete);
}

DeviceMesh DeviceMesh::from_group(const std::vector<GroupPtr>& groups, const std::string& device_type,
                                  const FromGroupOptions& options) {
  const auto world = current_world();
  check_device_type(device_type, where(world));
  TORCH_CHECK(!groups.empty(), where(world), "from_group() needs at least one group.");
  TORCH_CHECK(!options.mesh.ranks.empty(), where(world), "from_group() with ", groups.size(),
              " groups needs to know which ranks lie where. Give mesh.");
  const auto mesh = checked(options.mesh, where(world));
  TORCH_CHECK(mesh.shape.size() == groups.size(), where(world), "from_group() got ", groups.size(),
              " groups, but mesh has ", mesh.shape.size(), " dims. Give one group per dim.");
  TORCH_CHECK(groups.size() == 1 || !options.mesh_dim_names.empty(), where(world), "from_group() with ", groups.size(),
              " groups needs mesh_dim_names.");
  check_names(options.mesh_dim_names, groups.size(), where(world));

  // A group knows this rank's number better than the world does: it may come from elsewhere.
  const auto given = std::find_if(groups.begin(), groups.end(), [](const GroupPtr& group) { return group.defined(); });
  TORCH_CHECK(given != groups.end() || world, where(world),
              "from_group() got no group, so it cannot tell which rank this is. ", "Call lockstep::init() first.");
  const int rank = given != groups.end() ? global_ranks(*given)[(*given)->getRank()] : world->rank();
  const bool is_member = std::find(mesh.ranks.begin(), mesh.ranks.end(), rank) != mesh.ranks.end();
  const auto layout = MeshLayout::row_major(mesh.shape);
  for (std::size_t i = 0; i < groups.size(); ++i) {
    const auto name = options.mesh_dim_names.empty() ? str(i) : str("'", options.mesh_dim_names[i], "'");
    const auto lists = tile(layout.axes()[i], mesh.ranks);
    const auto mine = std::find_if(lists.begin(), lists.end(), [&](const auto& list) {
      return std::find(list.begin(), list.end(), rank) != list.end();
    });
    const auto expected = mine != lists.end() ? *mine : std::vector<int>{};
    const auto actual = groups[i] ? global_ranks(groups[i]) : std::vector<int>{};
    TORCH_CHECK(expected == actual, where(world), "from_group(): along mesh dim ", name, " the array puts rank ", rank,
                " with ranks (", join(expected, ", "), "), but its group has (", join(actual, ", "),
                "). Give the array the groups were made from.");
  }
  // NOLINTNEXTLINE(modernize-make-shared): make_shared takes no designated initialisers
  return DeviceMesh(std::shared_ptr<Root>(new Root{.world = world,
                                                   .rank = rank,
                                                   .device_type = device_type,
                                                   .ranks = mesh.ranks,
                                                   .layout = layout,
                                                   .names = options.mesh_dim_names,
                                                   .groups = is_member ? groups : std::vector<GroupPtr>{}}));
}

DeviceMesh init_device_mesh(const std::string& device_type, const std::vector<int64_t>& mesh_shape,
                            const MeshOptions& options) {
  const auto world = current_world();
  const auto count = bounded_product(mesh_shape, std::numeric_limits<int>::max());
  TORCH_CHECK(!mesh_shape.empty() && count > 0, where(world), "a mesh cannot have the shape (", join(mesh_shape, ", "),
              "). Give at least one dim, and sizes of at least 1.");
  // Before the ranks are written out: a mistyped shape may ask for billions of them.
  TORCH_CHECK(!world || count <= world->world_size(), where(world), "a mesh of shape (", join(mesh_shape, ", "),
              ") is larger than the world: it has ", count, " ranks, the world ", world ? world->world_size() : 0,
              ". Start more ranks, or make it smaller.");
  RankArray mesh{.ranks = std::vector<int>(count), .shape = mesh_shape};
  std::iota(mesh.ranks.begin(), mesh.ranks.end(), 0);
  return DeviceMesh::from_ranks(device_type, mesh, options);
}

}  // namespace lockstep
