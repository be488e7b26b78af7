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

/// The parts of the ranks that differ from this one along `axes` only, in row-major order.
std::vector<TensorPart> parts_along(const std::vector<int64_t>& axes, const Layout& layout) {
  const auto shape = layout.mesh().shape();
  std::vector<int64_t> sizes;
  int64_t count = 1;
  for (const auto axis : axes) {
    sizes.push_back(layout.mesh().size(axis));
    count *= sizes.back();
  }
  auto coordinate = layout.mesh().get_coordinate().value();
  std::vector<TensorPart> parts;
  for (int64_t i = 0; i < count; ++i) {
    const auto place = unravel(i, sizes);
    for (std::size_t j = 0; j < axes.size(); ++j) coordinate[static_cast<std::size_t>(axes[j])] = place[j];
    parts.push_back(part_at(coordinate, shape, layout.placements(), layout.sizes()));
  }
  return parts;
}

}  // namespace

at::Tensor gather_whole(const at::Tensor& part, const Layout& layout) {
  const at::NoGradGuard no_grad;
  TORCH_CHECK(!layout.has_partial(), "[lockstep/shard] rank ", layout.mesh().get_rank(), ": ", layout,
              " holds terms of a reduction, which are no parts. Reduce them first.");
  const auto axes = layout.dividing_axes();
  if (axes.empty()) return part.detach().clone();
  const auto parts = parts_along(axes, layout);
  int64_t elements = 0;  // all send as much as the one who has most
  for (const auto& each : parts) elements = std::max(elements, each.numel());
  auto all = part.detach().reshape({-1});
  if (all.numel() < elements) {
    all = at::zeros({elements}, part.options());
    all.narrow(0, 0, part.numel()).copy_(part.detach().reshape({-1}));
  }
  // The last axis first: in the end parts lie in the order of the axes.
  for (auto axis = axes.rbegin(); axis != axes.rend() && elements > 0; ++axis) {
    const auto more = at::empty({all.numel() * layout.mesh().size(*axis)}, part.options());
    all_gather_into_tensor(more, all.contiguous(), layout.mesh().get_group(*axis));
    all = more;
  }
  const auto& first = layout.placements()[static_cast<std::size_t>(axes.front())];
  if (axes.size() == 1 && std::holds_alternative<Shard>(first) && sharded_dim(first) == 0) {
    return all.narrow(0, 0, layout.numel()).view(layout.sizes());
  }
  auto whole = at::empty(layout.sizes(), part.options());
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const auto local = all.narrow(0, static_cast<int64_t>(i) * elements, parts[i].numel()).view(parts[i].sizes());
    for (const auto& box : parts[i].boxes()) {
      box_in(whole, box.offsets, box.sizes).copy_(box_in(local, box.local_offsets, box.sizes));
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
