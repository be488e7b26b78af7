// Ways to do a training step without its optimizer: forward, loss, backward.
#pragma once

#include <string>

#include "benchmarks/kit/training_rank.h"

namespace lockstep::bench {

/// "local": no communication. "ours": fully_shard() of every block, then of the model, with default options. "ddp":
/// DistributedDataParallel. Both over the world's group. Collective.
Contender make_contender(const std::string& name, const Case& which, const World& world);

}  // namespace lockstep::bench
