// Tells the ranks of an attempt which of them have ended: a rank that waits for another one to come shall not wait in
// vain. A folder with a file for every rank that ended; its name is in the ranks' environment.
#pragma once

#include <string>

#include "lockstep/launch/exit_status.h"

namespace lockstep::cli {

inline constexpr const char* kEndedVariable = "LOCKSTEP_ENDED_DIR";

class EndedRanks {
 public:
  /// If no folder can be made, path() is empty and nothing is told: no reason not to train.
  EndedRanks();
  EndedRanks(const EndedRanks&) = delete;
  EndedRanks& operator=(const EndedRanks&) = delete;
  ~EndedRanks();

  const std::string& path() const { return path_; }
  void add(int rank, const ExitStatus& status) const;

 private:
  std::string path_;
};

}  // namespace lockstep::cli
