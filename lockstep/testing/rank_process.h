// The child's side of run_processes(): who it is, and how it ends. Internal to the kit.
#pragma once

#include <optional>
#include <string>

#include "lockstep/testing/run.h"

namespace lockstep::testing::detail {

inline constexpr char kCallVariable[] = "LOCKSTEP_TEST_CALL";
inline constexpr char kRankVariable[] = "LOCKSTEP_TEST_RANK";
inline constexpr char kWorldSizeVariable[] = "LOCKSTEP_TEST_WORLD_SIZE";
inline constexpr char kStoreVariable[] = "LOCKSTEP_TEST_STORE";
/// What a rank sends when it passed: an exit code of 0 alone may mean that the body never ran.
inline constexpr char kPassedMark[] = "--passed--";
/// The text of what is thrown without one. Frameworks whose assertions throw such print what failed themselves.
inline constexpr char kForeignException[] = "an exception that is no std::exception";
/// Separates a rank's error text from where it was when it was stopped.
inline constexpr char kStoppedMark[] = "\n--stopped--\n";

struct RankIdentity {
  std::string call;
  int rank = 0;
  int world_size = 1;
  std::string store_path;
  int report_fd = -1;
};

/// Set in rank processes only.
std::optional<RankIdentity> rank_identity();

/// From now on the process reports its last events and stack when it is asked to stop.
void explain_rank_termination(const RankIdentity& self);

/// Joins the other ranks over the store file. Collective.
World join_world(const RankIdentity& self, const RunOptions& options);

/// Runs `body`, catching everything. Never throws.
RankOutcome run_guarded(const std::function<void()>& body, std::optional<int>* skip_code);

/// Sends `text` to the parent.
void send_report(const RankIdentity& self, const std::string& text);

/// Ends the process at once with what the outcome calls for; static destructors do not run, because after an error they
/// could hang.
[[noreturn]] void end_process(const RankIdentity& self, const RankOutcome& outcome, std::optional<int> skip_code);

}  // namespace lockstep::testing::detail
