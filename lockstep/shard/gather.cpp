#include "lockstep/shard/gather.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/objects.h"
#include "lockstep/shard/layout_of.h"

namespace lockstep {
namespace {

at::Tensor box_in(const at::Tensor& tensor, const std::vector<int64_t>& offsets, const std::vector<int64_t>& sizes) {
  auto box = tensor;
  for (std::size_t dim = 0; dim < sizes.size(); ++dim) {
    box = box.narrow(static_cast<int64_t>(dim), offsets[dim], sizes[dim]);
  }
  return box;
}

/// Calls `send` for every axis whose group passes on what the first rank has: those of ranks that are first in all
/// axes to the right.
template <class Send>
void along_axes(const DeviceMesh& mesh, const Send& send) {
  const auto& coordinate = mesh.get_coordinate();
  TORCH_CHECK(coordinate, "[lockstep/shard] rank ", mesh.get_rank(), " is not in ", mesh);
  for (int64_t axis = 0; axis < mesh.ndim(); ++axis) {
    const auto behind = coordinate->begin() + axis + 1;
    const bool is_on_way = std::all_of(behind, coordinate->end(), [](int each) { return each == 0; });
    if (is_on_way && mesh.size(axis) > 1) send(mesh.get_group(axis));
  }
}

}  // namespace

at::Tensor gather_whole(const at::Tensor& part, const Layout& layout) {
  const at::NoGradGuard no_grad;
  const auto axes = layout.dividing_axes();
  if (axes.empty()) return part.detach().clone();
  TORCH_CHECK(axes.size() == 1, "[lockstep/shard] rank ", layout.mesh().get_rank(), ": ", layout,
              " is divided along several axes of the mesh, and cannot be gathered");
  const auto axis = static_cast<std::size_t>(axes.front());
  const auto group = layout.mesh().get_group(axes.front());
  const auto dim = sharded_dim(layout.placements()[axis]).value();
  // All send as much as the one who has most: the first, unless counts are given.
  auto coordinate = layout.mesh().get_coordinate().value();
  const auto part_of = [&](int place) {
    coordinate[axis] = place;
    return part_at(coordinate, layout.mesh().shape(), layout.placements(), layout.sizes());
  };
  auto sizes = part_of(0).sizes();
  if (const auto* ragged = std::get_if<RaggedShard>(&layout.placements()[axis])) {
    sizes[static_cast<std::size_t>(dim)] = *std::max_element(ragged->counts.begin(), ragged->counts.end());
  }
  auto mine = part.detach();
  if (mine.sizes() != at::IntArrayRef(sizes)) {
    mine = at::zeros(sizes, part.options());
    mine.narrow(dim, 0, part.size(dim)).copy_(part.detach());
  }
  const auto ranks = static_cast<int64_t>(group->getSize());
  sizes.insert(sizes.begin(), ranks);
  const auto all = at::empty(sizes, part.options());
  if (all.numel() > 0) all_gather_into_tensor(all.view({-1}), mine.contiguous().view({-1}), group);
  if (dim == 0 && std::holds_alternative<Shard>(layout.placements()[axis])) {
    return all.flatten(0, 1).narrow(0, 0, layout.sizes()[0]);
  }
  auto whole = at::empty(layout.sizes(), part.options());
  for (int64_t rank = 0; rank < ranks; ++rank) {
    for (const auto& box : part_of(static_cast<int>(rank)).boxes()) {
      box_in(whole, box.offsets, box.sizes).copy_(box_in(all[rank], box.local_offsets, box.sizes));
    }
  }
  return whole;
}

void broadcast_over(const DeviceMesh& mesh, const at::Tensor& tensor) {
  along_axes(mesh, [&](const GroupPtr& group) {
    if (tensor.numel() > 0) broadcast(tensor, 0, group);
  });
}

std::string broadcast_over(const DeviceMesh& mesh, std::string bytes) {
  along_axes(mesh, [&](const GroupPtr& group) { bytes = broadcast_object(bytes, 0, group); });
  return bytes;
}

std::optional<DeviceMesh> largest_mesh(const std::vector<at::Tensor>& tensors) {
  std::optional<DeviceMesh> mesh;
  for (const auto& tensor : tensors) {
    const auto layout = layout_of(tensor);
    if (layout && (!mesh || layout->mesh().size() > mesh->size())) mesh = layout->mesh();
  }
  return mesh;
}

bool is_first_rank(const std::optional<DeviceMesh>& mesh) {
  return !mesh || mesh->get_rank() == mesh->ranks().front();
}

}  // namespace lockstep
