// Saving a training run: Python's torch.distributed.checkpoint.save() and async_save().
//
//   dcp::save("run/step-100", state);                       // all ranks; returns when it is on the disk
//
//   dcp::AsyncSaver saver;                                  // once, on all ranks
//   saver.save("run/step-100", state);                      // returns when a copy is in memory
//
// A checkpoint is a folder: safetensors files that ranks write side by side, and an index, lockstep.json, with
// everything else. It is written under another name and renamed when all of it is on the disk, so that a folder of this
// name is whole, and whatever had the name before stays until then. See docs/checkpoint.md.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/checkpoint/progress.h"
#include "lockstep/checkpoint/state.h"
#include "lockstep/comm/group.h"

namespace lockstep::dcp {

struct SaveOptions {
  /// Whose ranks save together; null: the default group, or this process alone if there is none.
  GroupPtr process_group = nullptr;
  /// Kept in the index.
  std::optional<int64_t> step = std::nullopt;
  /// Ranks write several files rather than longer ones.
  int64_t max_file_bytes = int64_t{5} << 30;
  /// Called on rank 0 when the folder has its name, before others learn of it. If it throws, all throw; the checkpoint
  /// stays.
  std::function<void()> on_saved = nullptr;
  /// Called on rank 0 with what it has written; by default a line on stderr if that is a terminal.
  ProgressFunction progress = nullptr;
};

/// Collective and blocking. All ranks must see the same folder. If one of them cannot write, all throw, naming the
/// file, and nothing is left of the attempt.
void save(const std::string& path, const State& state, const SaveOptions& options = {});

/// Saves while training goes on. One save at a time: another one waits for the one before. The memory for copies is
/// kept. For one thread.
class AsyncSaver {
 public:
  /// Collective: makes a group of its own, over which the saving threads talk.
  explicit AsyncSaver(const GroupPtr& group = nullptr);
  /// Waits for a save that is under way; what it throws is lost, with a warning.
  ~AsyncSaver();
  AsyncSaver(const AsyncSaver&) = delete;
  AsyncSaver& operator=(const AsyncSaver&) = delete;

  /// Returns when all that this rank is to write is copied. Waits for the last save and throws what that threw.
  /// Collective. `options.process_group` is not looked at.
  void save(const std::string& path, const State& state, const SaveOptions& options = {});
  /// Until the last save is on the disk. Throws, on all ranks, what went wrong. Blocking.
  void wait();
  bool is_saving() const;

 private:
  struct Job;
  std::unique_ptr<Job> job_;
};

}  // namespace lockstep::dcp
