// What tests of DTensors and tensor parallelism begin with: numbers of a seed, and all ranks in a line.
#pragma once

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include "lockstep/comm/world.h"
#include "lockstep/mesh/device_mesh.h"

namespace lockstep::testing {

inline at::Tensor numbers(at::IntArrayRef sizes, uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randn(sizes, generator);
}

inline DeviceMesh line(const World& world, const std::string& device_type = "cpu") {
  return init_device_mesh(device_type, {world.world_size()});
}

}  // namespace lockstep::testing
