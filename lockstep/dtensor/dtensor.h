// DTensor: a tensor whose elements lie on the ranks of a mesh. It is an at::Tensor with global sizes, so it goes
// through modules, autograd and optimizers as they are; what one rank holds of it is its local tensor. Names and
// meaning are those of Python's torch.distributed.tensor. docs/dtensor.md tells how it works.
//
//   auto mesh = lockstep::init_device_mesh("cpu", {2});
//   auto w = lockstep::distribute_tensor(weight, mesh, {lockstep::Shard(0)});
//   auto y = at::linear(lockstep::DTensor::from_local(x, mesh, {lockstep::Replicate()}), w);  // Shard(-1)
//   at::Tensor whole = lockstep::DTensor(y).full_tensor();
//
// Operators on DTensors may communicate: all ranks of the mesh call them, in one order. Ranks outside of it hold an
// empty local tensor, and call what the others call without taking part.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/mesh/device_mesh.h"
#include "lockstep/shard/layout.h"
#include "lockstep/shard/placement.h"

namespace lockstep {

bool is_dtensor(const at::Tensor& tensor);

struct FromLocalOptions {
  /// Compares sizes and dtypes of the ranks and gives replicas the values of the first rank of each axis. Collective.
  bool run_check = false;
  /// Of the whole tensor, both or none: without them all parts are taken to be of this rank's size. The order of dims
  /// in memory is the part's own in any case.
  std::optional<std::vector<int64_t>> shape = std::nullopt;
  std::optional<std::vector<int64_t>> stride = std::nullopt;
  /// What the gradient is brought to before it becomes the local tensor's; by default the placements themselves, with
  /// Replicate for Partial.
  std::optional<Placements> grad_placements = std::nullopt;
};

struct ToLocalOptions {
  /// What the gradient of the local tensor is: Partial for replicas that each rank uses in a way of its own. By default
  /// the tensor's placements, with Replicate for Partial.
  std::optional<Placements> grad_placements = std::nullopt;
};

struct RedistributeOptions {
  /// Returns while the last collective still runs; whoever first uses the result waits.
  bool async_op = false;
  /// Of what is sent forward, which is also the result's, and of what is sent backward.
  std::optional<at::ScalarType> forward_dtype = std::nullopt;
  std::optional<at::ScalarType> backward_dtype = std::nullopt;
};

/// A handle on an at::Tensor that is a DTensor; converts to and from it.
class DTensor {
 public:
  /// Refuses a tensor that is none.
  explicit DTensor(at::Tensor tensor);

  /// The tensor of which this rank holds `local`, whose memory it shares. Differentiable. Local, without run_check. A
  /// mesh may be left to the MeshScope.
  static DTensor from_local(const at::Tensor& local, const std::optional<DeviceMesh>& mesh,
                            const Placements& placements, const FromLocalOptions& options = {});

  const at::Tensor& tensor() const { return tensor_; }
  operator const at::Tensor&() const { return tensor_; }  // NOLINT(google-explicit-constructor): it is one

  const Layout& layout() const;
  const DeviceMesh& device_mesh() const { return layout().mesh(); }
  const Placements& placements() const { return layout().placements(); }

  /// What this rank holds: another handle on its memory. Differentiable. Waits for a redistribution under way. Local.
  at::Tensor to_local(const ToLocalOptions& options = {}) const;

  /// The same values under other placements of the same mesh. Differentiable. Collective where values must travel.
  DTensor redistribute(const Placements& placements, const RedistributeOptions& options = {}) const;

  /// All of it on every rank, as an ordinary tensor. Differentiable. Collective over the mesh.
  at::Tensor full_tensor(const ToLocalOptions& options = {}) const;

  /// "DTensor(float[8, 4], (Shard(dim=0)), DeviceMesh(…), local [4, 4])".
  std::string to_string() const;

 private:
  at::Tensor tensor_;
};

/// Its to_string(). Local, where libtorch's for at::Tensor wants values. Throws nothing.
std::ostream& operator<<(std::ostream& out, const DTensor& tensor);

struct DistributeOptions {
  /// Whose values count, by its number in the group of every axis. None: each rank cuts its own, and nothing is sent.
  std::optional<int> src_data_rank = 0;
};

/// A leaf as a DTensor: by default a replica on every rank. Keeps requires_grad. Of a DTensor itself, if that has these
/// placements on this mesh. Collective over the mesh unless src_data_rank is none.
DTensor distribute_tensor(const at::Tensor& tensor, const std::optional<DeviceMesh>& mesh,
                          const Placements& placements = {}, const DistributeOptions& options = {});

}  // namespace lockstep
