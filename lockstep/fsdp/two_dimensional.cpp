#include "lockstep/fsdp/two_dimensional.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "lockstep/base/str.h"
#include "lockstep/shard/layout_of.h"

namespace lockstep::detail {
namespace {

// As Python has it: an axis for experts and one for tensors, beside one that replicates and one that shards.
constexpr int64_t kMostAxesBefore = 2;

bool holds(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

/// Some axes as one.
DeviceMesh one_axis(const DeviceMesh& mesh, const std::vector<std::string>& names) {
  auto axes = mesh.slice(names);
  return names.size() == 1 ? axes : axes.flatten();
}

std::string who_has(const std::string& name, const DeviceMesh& mesh) {
  return str("[lockstep/fsdp] rank ", mesh.get_rank(), ": parameter '", name, "'");
}

}  // namespace

Layout combined(const Layout& division, const Layout& before) {
  auto first = division.placements();
  const auto dim = sharded_dim(first.back());
  int64_t split = 1;
  bool is_even = true;
  for (std::size_t axis = 0; axis < before.placements().size(); ++axis) {
    const auto& placement = before.placements()[axis];
    if (sharded_dim(placement) != dim) continue;
    split *= before.mesh().size(static_cast<int64_t>(axis));
    is_even = is_even && std::holds_alternative<Shard>(placement);
  }
  const auto ranks = division.mesh().size(division.mesh().ndim() - 1);
  is_even = is_even && before.sizes()[static_cast<std::size_t>(dim.value())] % (split * ranks) == 0;
  const auto& last = before.placements();
  if (split == 1 || is_even) {
    if (split > 1) first.back() = StridedShard(*dim, split);
    first.insert(first.end(), last.begin(), last.end());
    return {DeviceMesh::concatenate({division.mesh(), before.mesh()}), first, before.sizes()};
  }
  auto turned = last;
  turned.insert(turned.end(), first.begin(), first.end());
  return {DeviceMesh::concatenate({before.mesh(), division.mesh()}), turned, before.sizes()};
}

DeviceMesh data_parallel_mesh(const DeviceMesh& spmd_mesh, const DataParallelMeshDims& dims) {
  const auto& known = spmd_mesh.mesh_dim_names();
  TORCH_CHECK(!dims.shard.empty() || !dims.replicate.empty(),
              "[lockstep/fsdp] dp_mesh_dims names no axis. Name one that shards, one that replicates, or both.");
  for (const auto* names : {&dims.shard, &dims.replicate}) {
    for (const auto& name : *names) {
      TORCH_CHECK(holds(known, name), "[lockstep/fsdp] dp_mesh_dims names '", name, "', and the mesh is ", spmd_mesh,
                  ". Name axes of it", known.empty() ? ", which needs mesh_dim_names for that." : ".");
    }
  }
  for (const auto& name : dims.shard) {
    TORCH_CHECK(!holds(dims.replicate, name), "[lockstep/fsdp] dp_mesh_dims has '", name,
                "' shard and replicate. An axis does one of them.");
  }
  if (dims.replicate.empty()) return one_axis(spmd_mesh, dims.shard);
  const auto replicate = one_axis(spmd_mesh, dims.replicate);
  if (dims.shard.empty()) return replicate.with_axis_of_one(replicate.mesh_dim_names().front() + "_alone");
  return DeviceMesh::concatenate({replicate, one_axis(spmd_mesh, dims.shard)});
}

std::optional<Layout> cut_before(const std::string& name, const at::Tensor& parameter, const FullyShardOptions& options,
                                 const std::optional<DeviceMesh>& spmd_mesh) {
  const auto layout = layout_of(parameter);
  if (!spmd_mesh) return layout ? std::optional(*layout) : std::nullopt;
  const auto who = who_has(name, *spmd_mesh);
  TORCH_CHECK(layout && layout->mesh() == *spmd_mesh, who, " is ", layout ? layout->to_string() : "a plain tensor",
              ", and dp_mesh_dims is for parameters on ", *spmd_mesh,
              ". Give it a layout there, with Replicate on the ",
              "axes for data, or leave dp_mesh_dims out and give the mesh of these axes.");
  const auto& dims = *options.dp_mesh_dims;
  std::vector<std::string> others;
  Placements placements;
  for (std::size_t axis = 0; axis < layout->placements().size(); ++axis) {
    const auto& axis_name = spmd_mesh->mesh_dim_names()[axis];
    const auto& placement = layout->placements()[axis];
    if (!holds(dims.shard, axis_name) && !holds(dims.replicate, axis_name)) {
      others.push_back(axis_name);
      placements.push_back(placement);
      continue;
    }
    TORCH_CHECK(std::holds_alternative<Replicate>(placement), who, " is ", placement, " on mesh dim '", axis_name,
                "', which dp_mesh_dims has for data. It must be Replicate there: fully_shard() is what cuts it.");
  }
  if (others.empty()) return std::nullopt;
  return Layout(spmd_mesh->slice(others), placements, layout->sizes());
}

bool is_cut_twice(const WholeParameter& parameter) {
  if (!parameter.cut_before) return false;
  const auto& placements = parameter.cut_before->placements();
  return std::any_of(placements.begin(), placements.end(),
                     [&](const Placement& each) { return sharded_dim(each) == parameter.dim; });
}

void check_cut_before(const WholeParameter& parameter, const DeviceMesh& mesh, const FullyShardOptions& options) {
  if (!parameter.cut_before) return;
  const auto& before = *parameter.cut_before;
  const auto who = str(who_has(parameter.name, mesh), ", which is ", before);
  TORCH_CHECK(before.mesh().ndim() <= kMostAxesBefore, who, ", is on more than ", kMostAxesBefore,
              " axes beside those for data. Put it on fewer.");
  TORCH_CHECK(!before.has_partial(), who, ", holds terms of a sum, which cannot be divided. Reduce them first.");
  TORCH_CHECK(!options.reshard_after_forward || !options.reshard_after_forward->is_count(), who,
              ", and reshard_after_forward is a number, which goes with parameters that nobody has cut before only. ",
              "Say true or false.");
  TORCH_CHECK(options.use_orig_params, who, ", cannot be part of a flat parameter. Set use_orig_params.");
  const bool is_ragged =
      !parameter.counts.empty() ||
      std::any_of(before.placements().begin(), before.placements().end(), [&](const Placement& each) {
        return std::holds_alternative<RaggedShard>(each) && sharded_dim(each) == parameter.dim;
      });
  TORCH_CHECK(!is_cut_twice(parameter) || !is_ragged, who, ", would be cut along dim ", parameter.dim,
              " once more, and one of the cuts is ragged. Leave the numbers of rows out, or cut another dim.");
  try {
    DeviceMesh::concatenate({mesh, before.mesh()});
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, who, ", cannot be sharded on ", mesh, " as well: ", error.what_without_backtrace(),
                " Make one mesh with an axis for data and one for tensors, say (dp, tp), and give fully_shard() its ",
                "slice for data: {.mesh = mesh[\"dp\"]}.");
  }
}

}  // namespace lockstep::detail
