// What a run of several ranks is given and what comes out of it, for ranks as threads and as processes alike.
// The kit knows no test framework; gtest.h adapts it to GoogleTest.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "lockstep/comm/world.h"

namespace lockstep::testing {

/// What each rank runs.
using RankBody = std::function<void(const World& world)>;

struct RunOptions {
  /// 0: one per GPU, at most 8; 4 without GPUs.
  int world_size = 0;
  /// Empty: "threads" for threads; for processes NCCL if every rank has a GPU of its own, else gloo.
  std::string backend = "";
  /// Of the whole run. Zero: LOCKSTEP_TEST_TIMEOUT (seconds) or 300 s.
  std::chrono::milliseconds timeout{0};
  /// Of each collective: the deadline behind the hang guard. Zero: 60 s, or the run's timeout if that is less.
  std::chrono::milliseconds collective_timeout{0};
  /// Threads only: random yields and late completions from this seed. LOCKSTEP_CHAOS_SEED sets it for every run.
  std::optional<std::uint64_t> chaos_seed = std::nullopt;
  /// Threads only: every result appears in wait() and not before.
  bool completes_late = false;
  /// Processes only: the code every rank shall end with, for tests of failures. A rank killed by signal s counts as 128
  /// + s.
  std::optional<int> expected_exit_code = std::nullopt;
  /// Run on every rank before and after the body; the second also if the body failed, unless the rank was stopped.
  RankBody set_up = nullptr;
  RankBody tear_down = nullptr;
};

/// Fails a test; carries the whole message.
class CheckFailure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// How one rank ended.
struct RankOutcome {
  enum class Kind { kPassed, kFailed, kSkipped, kHung, kStopped };
  Kind kind = Kind::kPassed;
  /// kFailed: the error. kSkipped: the reason. kHung, kStopped: where it was.
  std::string text = "";
};

struct RunReport {
  std::vector<RankOutcome> ranks = {};
  /// Failures of the run as a whole, such as ranks that ended differently.
  std::string problem = "";
  /// How to see the same again: a seed, say.
  std::string replay = "";

  bool has_passed() const;
  /// The common reason if all ranks skipped.
  std::optional<std::string> skipped() const;
  /// Everything a reader needs: failed and hung ranks with their texts first, then those that were stopped.
  std::string describe() const;
};

/// Defaults filled in from the machine and the environment.
RunOptions with_defaults(RunOptions options, bool as_processes);

/// What a rank does between joining and leaving its world, in either harness: reset, set-up, seed, `body`, tear-down,
/// reset.
void run_body(const RunOptions& options, const World& world, const RankBody& body);

/// Fills report.problem if the ranks did not end alike.
void judge(RunReport& report);

}  // namespace lockstep::testing
