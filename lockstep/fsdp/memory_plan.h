// What sharding a model takes of a rank's memory, known before the first step.
//
//   std::cout << lockstep::memory_plan(*model).to_string();
//
// Activations and the optimizer's state are not in it: they depend on the program.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

namespace lockstep {

/// Of one unit on one rank, in bytes.
struct UnitMemory {
  std::string name = "";
  int64_t shards = 0;           // always there; their gradients take the same after a step
  int64_t whole = 0;            // while it computes
  int64_t whole_gradients = 0;  // until they are reduced
  int64_t reduction = 0;        // buffers of the reduction
};

struct MemoryPlan {
  std::vector<UnitMemory> units = {};  // in the order of a forward, the root last
  int64_t between_steps = 0;           // shards
  int64_t peak = 0;                    // in a step: shards, whole parameters, gradients, buffers

  /// A table, with the sums below.
  std::string to_string() const;
};

/// For the sharded module `root`. As if units ran in the order in which they are registered, and the root's own
/// parameters before and behind them. Local.
MemoryPlan memory_plan(const torch::nn::Module& root);

}  // namespace lockstep
