#include "lockstep/dtensor/dtensor.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <ostream>
#include <utility>

#include "lockstep/base/str.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/objects.h"
#include "lockstep/dtensor/autograd.h"
#include "lockstep/dtensor/dtensor_impl.h"
#include "lockstep/mesh/mesh_scope.h"

namespace lockstep {
namespace {

using detail::dtensor_impl;
using detail::LayoutPtr;

Placements placements_or_replicate(const DeviceMesh& mesh, const Placements& placements) {
  return placements.empty() ? Placements(static_cast<std::size_t>(mesh.ndim()), Replicate()) : placements;
}

/// Of a tensor of which every rank holds as much as this one.
std::vector<int64_t> even_sizes(const at::Tensor& local, const DeviceMesh& mesh, const Placements& placements) {
  auto sizes = local.sizes().vec();
  for (std::size_t axis = 0; axis < placements.size(); ++axis) {
    auto dim = sharded_dim(placements[axis]);
    if (!dim) continue;
    if (*dim < 0) *dim += local.dim();
    TORCH_CHECK(*dim >= 0 && *dim < local.dim(), "[lockstep/dtensor] rank ", mesh.get_rank(), ", ", mesh, ": ",
                to_string(placements[axis]), " on mesh dim ", axis, " cuts a dim that a local tensor of ", local.dim(),
                " dims does not have.");
    sizes[static_cast<std::size_t>(*dim)] *= mesh.size(static_cast<int64_t>(axis));
  }
  return sizes;
}

/// All ranks of the mesh hear of one that was given something else, and throw together.
void check_same(const at::Tensor& local, const Layout& layout) {
  const auto& mesh = layout.mesh();
  auto all = lockstep::str(local.scalar_type(), "[", join(layout.sizes(), ", "), "]");
  auto same = all;
  for (auto axis = mesh.ndim() - 1; axis >= 0; --axis) {
    all = join(all_gather_object(all, mesh.get_group(axis)), "; ");
    same = join(std::vector<std::string>(static_cast<std::size_t>(mesh.size(axis)), same), "; ");
  }
  TORCH_CHECK(all == same, "[lockstep/dtensor] rank ", mesh.get_rank(), ", ", mesh,
              ": DTensor::from_local() gets parts of different tensors. Those of its ranks, in order: ", all,
              ". Give all ranks parts of one, with shape and stride where parts are uneven.");
}

/// The values of the first rank along every axis that replicates.
void make_equal(const at::Tensor& local, const Layout& layout) {
  const auto& mesh = layout.mesh();
  check_same(local, layout);
  for (int64_t axis = 0; axis < mesh.ndim(); ++axis) {
    if (std::holds_alternative<Replicate>(layout.placements()[static_cast<std::size_t>(axis)])) {
      const at::NoGradGuard no_grad;
      auto values = local.contiguous();
      broadcast(values, 0, mesh.get_group(axis));
      if (!values.is_same(local)) local.copy_(values);
    }
  }
}

const Layout& layout_of_dtensor(const at::Tensor& tensor) {
  return *dtensor_impl(tensor)->layout();
}

/// A layer's member, and a view of it, stands for what autograd knows.
at::Tensor recorded(const at::Tensor& tensor) {
  const auto& style = dtensor_impl(tensor)->style();
  return style ? style->real_tensor(tensor) : tensor;
}

}  // namespace

bool is_dtensor(const at::Tensor& tensor) {
  return dtensor_impl(tensor) != nullptr;
}

DTensor::DTensor(at::Tensor tensor) : tensor_(std::move(tensor)) {
  TORCH_CHECK(is_dtensor(tensor_), "[lockstep/dtensor] ",
              tensor_.defined() ? lockstep::str("a tensor of sizes ", tensor_.sizes()) : "an undefined tensor",
              " is no DTensor. Make one with DTensor::from_local() or distribute_tensor().");
}

DTensor DTensor::from_local(const at::Tensor& local, const std::optional<DeviceMesh>& given_mesh,
                            const Placements& given_placements, const FromLocalOptions& options) {
  const auto mesh = mesh_or_current(given_mesh);
  TORCH_CHECK(local.defined() && !is_dtensor(local), "[lockstep/dtensor] rank ", mesh.get_rank(),
              ": DTensor::from_local() takes this rank's part as an ordinary tensor. For other placements of a DTensor "
              "call redistribute().");
  TORCH_CHECK(options.shape.has_value() == options.stride.has_value(), "[lockstep/dtensor] rank ", mesh.get_rank(),
              ": DTensor::from_local() takes shape and stride of the whole tensor together, or neither.");
  const auto placements = placements_or_replicate(mesh, given_placements);
  auto sizes = options.shape ? *options.shape : even_sizes(local, mesh, placements);
  const LayoutPtr layout = std::make_shared<const Layout>(mesh, placements, std::move(sizes));
  const auto part = mesh.is_member() ? local : local.flatten().narrow(0, 0, 0);
  TORCH_CHECK(part.sizes() == at::IntArrayRef(layout->local_sizes()), "[lockstep/dtensor] rank ", mesh.get_rank(), ", ",
              mesh, ": DTensor::from_local() got a local tensor of sizes ", part.sizes(), " for a tensor of sizes [",
              join(layout->sizes(), ", "), "] and placements ", lockstep::to_string(layout->placements()),
              ", of which this rank holds [", join(layout->local_sizes(), ", "), "].");
  if (options.run_check && mesh.is_member()) make_equal(part, *layout);
  const auto gradient = options.grad_placements ? Layout(mesh, *options.grad_placements, layout->sizes()).placements()
                                                : detail::gradient_placements(layout->placements());
  return DTensor(detail::wrap_differentiably(part, layout, gradient));
}

const Layout& DTensor::layout() const {
  return layout_of_dtensor(tensor_);
}

at::Tensor DTensor::to_local(const ToLocalOptions& options) const {
  const auto gradient = options.grad_placements
                            ? Layout(device_mesh(), *options.grad_placements, layout().sizes()).placements()
                            : detail::gradient_placements(placements());
  return detail::unwrap_differentiably(recorded(tensor_), gradient);
}

DTensor DTensor::redistribute(const Placements& target, const RedistributeOptions& options) const {
  const Layout wanted(device_mesh(), target, layout().sizes());
  for (std::size_t axis = 0; axis < target.size(); ++axis) {
    TORCH_CHECK(
        !std::holds_alternative<Partial>(wanted.placements()[axis]) || wanted.placements()[axis] == placements()[axis],
        "[lockstep/dtensor] rank ", device_mesh().get_rank(), ", ", device_mesh(), ": a DTensor of sizes [",
        join(layout().sizes(), ", "), "] and placements ", lockstep::to_string(placements()),
        " cannot be redistributed to ", lockstep::to_string(wanted.placements()),
        ": terms of a sum come from operators, not from redistribute().");
  }
  return DTensor(detail::redistribute_differentiably(recorded(tensor_), wanted.placements(), options));
}

at::Tensor DTensor::full_tensor(const ToLocalOptions& options) const {
  const Placements whole(placements().size(), Replicate());
  return redistribute(whole).to_local(options);
}

std::string DTensor::to_string() const {
  return lockstep::str("DTensor(", tensor_.scalar_type(), "[", join(layout().sizes(), ", "), "], ",
                       lockstep::to_string(placements()), ", ", device_mesh(), ", local ",
                       dtensor_impl(tensor_)->local().sizes(), ")");
}

std::ostream& operator<<(std::ostream& out, const DTensor& tensor) {
  return out << tensor.to_string();
}

namespace {

/// Cuts the source rank's values: each axis in turn gives its ranks what they hold, the outermost first.
at::Tensor values_of_source(const at::Tensor& tensor, const DeviceMesh& mesh, int source) {
  auto values = tensor.detach().contiguous().clone();
  for (int64_t axis = 0; axis < mesh.ndim(); ++axis) broadcast(values, source, mesh.get_group(axis));
  return values;
}

}  // namespace

DTensor distribute_tensor(const at::Tensor& tensor, const std::optional<DeviceMesh>& given_mesh,
                          const Placements& given_placements, const DistributeOptions& options) {
  const auto mesh = mesh_or_current(given_mesh);
  const auto placements = placements_or_replicate(mesh, given_placements);
  if (is_dtensor(tensor)) {
    const DTensor distributed(tensor);
    const Layout wanted(mesh, placements, tensor.sizes().vec());
    TORCH_CHECK(distributed.layout() == wanted, "[lockstep/dtensor] rank ", mesh.get_rank(),
                ": distribute_tensor() got ", distributed.to_string(), " for placements ", to_string(placements),
                " on ", mesh, ". For other placements call redistribute().");
    return distributed;
  }
  TORCH_CHECK(tensor.defined() && tensor.is_leaf(), "[lockstep/dtensor] rank ", mesh.get_rank(),
              ": distribute_tensor() takes leaf tensors only, and this one was computed. Use DTensor::from_local(), "
              "which is differentiable.");
  const LayoutPtr layout = std::make_shared<const Layout>(mesh, placements, tensor.sizes().vec());
  TORCH_CHECK(!layout->has_partial(), "[lockstep/dtensor] rank ", mesh.get_rank(),
              ": distribute_tensor() cannot make terms of a sum, ", to_string(layout->placements()),
              ". Use DTensor::from_local().");
  auto local = at::empty({0}, tensor.options().requires_grad(false));
  if (mesh.is_member()) {
    const at::NoGradGuard no_grad;
    const auto values =
        options.src_data_rank ? values_of_source(tensor, mesh, *options.src_data_rank) : tensor.detach();
    local = layout->cut(values).clone(at::MemoryFormat::Contiguous);
  }
  auto made = detail::wrap_local(std::move(local), layout);
  made.set_requires_grad(tensor.requires_grad());
  return DTensor(made);
}

}  // namespace lockstep
