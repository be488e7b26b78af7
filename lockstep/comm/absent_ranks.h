// Ranks that are waited for and may never come: one that has ended, as the launcher tells, and those that nobody has
// heard of for long. Internal to comm.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/group_state.h"

namespace lockstep::detail {

/// How rank `rank` of the job ended, "exit code 0" say; nullopt while it runs, or if the launcher does not tell.
std::optional<std::string> how_rank_ended(const std::string& ended_dir, int rank);

/// To be asked again and again while ranks of `group` check in.
class AbsenceWatch {
 public:
  /// `key`: what rank r of the group leaves in the store. Borrows all arguments.
  AbsenceWatch(c10d::Store& store, const GroupDescription& group, const std::string& what,
               const std::function<std::string(int)>& key);

  /// In the world's numbers. Asks the store.
  std::vector<int> absent() const;

  /// "rank 2 ended (exit code 0) before it came", as far as the launcher or the process itself tells, or nothing. Warns
  /// once of those that are absent for long.
  std::string look();

 private:
  bool has_come(int rank) const { return store_.check({key_(rank)}); }

  c10d::Store& store_;
  const GroupDescription& group_;
  const std::string& what_;
  const std::function<std::string(int)>& key_;
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  bool has_warned_ = false;
};

}  // namespace lockstep::detail
