// The checkpoints of a run, in one folder: when to save, which to keep, and where to go on.
//
//   dcp::CheckpointManager manager("run", {.every = 500, .keep_last = 2, .keep_every = 10000});
//   auto step = manager.resume(state).value_or(0);
//   for (; step < steps; ) {
//     train_one_step();
//     manager.save_if_due(++step, state);
//   }
//   manager.wait();
//
// run/step-00000500, run/step-00001000, …, and run/latest, a link to the newest.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/checkpoint/load.h"
#include "lockstep/checkpoint/save.h"

namespace lockstep::dcp {

struct CheckpointManagerOptions {
  /// Steps between saves.
  int64_t every = 1000;
  /// Older ones are removed once a newer one is on the disk; 0 keeps all.
  int64_t keep_last = 3;
  /// Those of steps that it divides stay for good; 0 for none.
  int64_t keep_every = 0;
  /// Training goes on while a save is written.
  bool asynchronous = false;
  GroupPtr process_group = nullptr;
  int64_t max_file_bytes = int64_t{5} << 30;
  ProgressFunction progress = nullptr;
};

/// For one thread.
class CheckpointManager {
 public:
  /// Collective if it is asynchronous. Refuses numbers below what their comments say.
  explicit CheckpointManager(std::string folder, CheckpointManagerOptions options = {});
  ~CheckpointManager();
  CheckpointManager(const CheckpointManager&) = delete;
  CheckpointManager& operator=(const CheckpointManager&) = delete;

  /// Saves if `every` divides the step. Collective; all ranks are at the same step.
  bool save_if_due(int64_t step, const State& state);
  void save(int64_t step, const State& state);
  /// Until the last asynchronous save is on the disk; throws what went wrong with it.
  void wait();

  /// Loads the newest checkpoint that is whole, and says of which step it is; none if there is none. One that turns out
  /// to be damaged is passed over with a warning; one that does not fit the state is an error. What saves that were cut
  /// off have left is removed. Collective.
  std::optional<int64_t> resume(const State& state, LoadOptions options = {});

  /// Those in the folder that look whole, the oldest first. Local.
  std::vector<int64_t> steps() const;
  std::string path_of(int64_t step) const;

 private:
  void remove_unfinished() const;
  void on_saved(int64_t step) const;

  const std::string folder_;
  const CheckpointManagerOptions options_;
  std::unique_ptr<AsyncSaver> saver_;
};

}  // namespace lockstep::dcp
