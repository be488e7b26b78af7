// Ways to do a training step without its optimizer: forward, loss, backward.
#pragma once

#include <functional>
#include <string>

#include "lockstep/comm/world.h"

namespace lockstep::bench {

struct Contender {
  std::string name;
  std::function<void()> step;  // collective
};

struct Case {
  std::string model;
  int64_t width = 32;
  bool as_view = false;
};

/// "local": no communication. "ours": DistributedDataParallel over the world's group. "c10d-reducer": libtorch's
/// Reducer over gloo (or NCCL for CUDA tensors), as Python's wrapper drives it. Collective.
Contender make_contender(const std::string& name, const Case& which, const World& world);

}  // namespace lockstep::bench
