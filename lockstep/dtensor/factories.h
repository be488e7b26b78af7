// DTensors by global sizes, under Python's names (torch.distributed.tensor.zeros, …): each rank makes its part.
//
//   auto w = lockstep::dtensor::randn({1024, 512}, {.mesh = mesh, .placements = {lockstep::Shard(0)}});
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <optional>

#include "lockstep/dtensor/dtensor.h"

namespace lockstep::dtensor {

struct FactoryOptions {
  /// May be left to the MeshScope.
  std::optional<DeviceMesh> mesh = std::nullopt;
  /// By default a replica on every rank. Terms of a sum are refused.
  Placements placements = {};
  std::optional<at::ScalarType> dtype = std::nullopt;
  /// By default the current one of the mesh's kind.
  std::optional<at::Device> device = std::nullopt;
  bool requires_grad = false;
  /// Of rand() and randn(): must stand alike on all ranks. By default the device's own, see docs/dtensor.md.
  std::optional<at::Generator> generator = std::nullopt;
};

/// Local.
DTensor zeros(at::IntArrayRef sizes, const FactoryOptions& options = {});
DTensor ones(at::IntArrayRef sizes, const FactoryOptions& options = {});
DTensor full(at::IntArrayRef sizes, const at::Scalar& fill_value, const FactoryOptions& options = {});
DTensor empty(at::IntArrayRef sizes, const FactoryOptions& options = {});
/// The values that one device would draw. Collective over the mesh the first time it draws.
DTensor rand(at::IntArrayRef sizes, const FactoryOptions& options = {});
DTensor randn(at::IntArrayRef sizes, const FactoryOptions& options = {});

}  // namespace lockstep::dtensor
