// One save, in the steps it is made of, which blocking and asynchronous saves share. Internal to checkpoint.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "lockstep/checkpoint/folder.h"
#include "lockstep/checkpoint/save.h"
#include "lockstep/checkpoint/save_plan.h"
#include "lockstep/checkpoint/together.h"

namespace lockstep::detail {

/// Memory that saves copy to, in turn.
class StagingBuffer {
 public:
  /// Copies of what is given, all in one block that stays for the next time. Waits for devices.
  std::vector<at::Tensor> copies_of(const std::vector<at::Tensor>& tensors);

 private:
  at::Tensor block_;
};

class SaveJob {
 public:
  /// Asks the state, agrees on a plan and makes a folder to write to. Collective.
  SaveJob(std::string path, const dcp::State& state, dcp::SaveOptions options, const Together& together);

  /// From now on the state may change. Collective.
  void stage(StagingBuffer& buffer, const Together& together);

  /// Writes this rank's files and, when all have, gives the folder its name. Collective over `together`, which has the
  /// ranks of the constructor's.
  void run(const Together& together);

 private:
  /// Returns the checksums of this rank's pieces, packed.
  std::string write_files();
  void take_checksums(const std::vector<std::string>& said);
  void commit();

  const std::string path_;
  const std::string what_;  // opens messages
  const dcp::SaveOptions options_;
  const int rank_;
  SavePlan plan_;
  std::optional<NewFolder> folder_;  // rank 0's, who removes it if something goes wrong
  /// What this rank writes, in the order of its files and their pieces.
  std::vector<at::Tensor> values_;
};

}  // namespace lockstep::detail
