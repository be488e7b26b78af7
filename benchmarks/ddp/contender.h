// Ways to do a training step without its optimizer: forward, loss, backward.
#pragma once

#include <string>

#include "benchmarks/kit/training_rank.h"

namespace lockstep::bench {

/// "local": no communication. "ours": DistributedDataParallel over the world's group; "ours-copies": the same with a
/// comm hook, so that gradients are copied into buckets and back also if there is nobody to average with.
/// "c10d-reducer": libtorch's Reducer over gloo (or NCCL for CUDA tensors), as Python's wrapper drives it. Collective.
Contender make_contender(const std::string& name, const Case& which, const World& world);

}  // namespace lockstep::bench
