// A training run in files, a part for each rank: written on some ranks, read on any other number of them.
//
//   lockstep::save_sharded(*model, optimizer, "run/step100");   // run/step100, run/step100.<save>.shard0, …
//   lockstep::load_sharded(*model, optimizer, "run/step100");   // each rank takes its rows
//
// The first file says which parts there are. It is written last, in place of the one before, whose parts are removed
// then: a save that fails or is cut off leaves the last one as it was.
//
// All ranks that the parameters' layouts name take part: with tensor parallelism alone those of one slice. Of replicas
// of it that save to one path one slice writes, whichever comes first, and the others wait for it.
#pragma once

#include <string>

#include "lockstep/fsdp/optimizer_state.h"

namespace lockstep {

/// Every rank of the mesh writes the parameters' shards, the buffers and its part of the optimizer's state. Collective
/// and blocking: if a file cannot be written, all ranks throw, naming it.
void save_sharded(const torch::nn::Module& module, const torch::optim::Optimizer& optimizer, const std::string& path);
/// Without an optimizer.
void save_sharded(const torch::nn::Module& module, const std::string& path);

/// Reads one part after the other, all of which must be of one save, and keeps what this rank needs. Local. Throws if
/// something is missing or does not fit, having changed nothing.
void load_sharded(torch::nn::Module& module, torch::optim::Optimizer& optimizer, const std::string& path,
                  const LoadShardedStateOptions& options = {});
void load_sharded(torch::nn::Module& module, const std::string& path, const LoadShardedStateOptions& options = {});

}  // namespace lockstep
