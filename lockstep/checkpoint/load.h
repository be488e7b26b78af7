// Loading what dcp::save() wrote, on any number of ranks and in any layout; and what Python wrote, if it is
// safetensors: a Hugging Face folder, shards of torch.distributed.checkpoint, one file.
//
//   const auto loaded = dcp::load("run/step-100", state);
//
// A rank reads only what it needs. Nothing is changed before everything was found to fit, on all ranks.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/checkpoint/progress.h"
#include "lockstep/checkpoint/state.h"
#include "lockstep/comm/group.h"

namespace lockstep::dcp {

/// When bytes are compared with the checksums that were written with them. Files of others have none.
enum class Verify {
  kNever,
  kWhileReading,  ///< which costs next to nothing; if they are others, a part of the state has been loaded by then
  kFirst,         ///< before anything is changed; reads everything twice
};

struct LoadOptions {
  /// Whose ranks load together; null: the default group, or this process alone if there is none.
  GroupPtr process_group = nullptr;
  /// What is missing in the checkpoint, and what nobody asks for there, is an error that lists it. Entries of the
  /// checkpoint that the state does not have are not looked at.
  bool strict = true;
  /// Tensors of another dtype are cast; otherwise they are an error.
  bool casts = false;
  Verify verify = Verify::kWhileReading;
  /// What a name of the state is called in the checkpoint: given "model.head.weight".
  std::function<std::string(const std::string& name)> name_in_checkpoint = nullptr;
  /// Called on rank 0 with what it has read; by default a line on stderr if that is a terminal.
  ProgressFunction progress = nullptr;
};

struct Loaded {
  std::optional<int64_t> step = std::nullopt;
  int saved_world_size = 1;
  /// On this rank, by name; of use if it was not strict.
  std::vector<std::string> missing = {};
  std::vector<std::string> not_asked_for = {};
};

/// Collective and blocking. If something does not fit or is missing on one rank, all throw, and nothing has changed,
/// but that meta tensors have got memory. If bytes cannot be read or are damaged, all throw; see Verify.
Loaded load(const std::string& path, const State& state, const LoadOptions& options = {});

}  // namespace lockstep::dcp
