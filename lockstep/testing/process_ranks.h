// Ranks as processes: this very program, started again once per rank and led to the same call. What a rank needs to
// know travels in LOCKSTEP_TEST_* variables; its error text comes back through a pipe, its verdict as the exit code.
// See docs/testing.md.
#pragma once

#include <string>
#include <vector>

#include "lockstep/testing/run.h"

namespace lockstep::testing {

/// How to reach this call again in a fresh process, and which call it is.
struct ProcessCall {
  /// Identifies the call within the program; a test calling twice must use two names.
  std::string name;
  /// Arguments after the program's name that make a fresh process come here.
  std::vector<std::string> arguments;
  /// Variables that would lead it elsewhere; removed from its environment.
  std::vector<std::string> unset = {};
};

/// In the parent: starts the ranks, waits, reports. In a rank's process: runs `body` if the call's name is the rank's,
/// and does not return; other calls return an empty, passed report at once. The group is destroyed only after a clean
/// end: after an error it might wait for collectives nobody finishes.
RunReport run_processes(RunOptions options, const ProcessCall& call, const RankBody& body);

/// True in a process that is a rank of some run_processes() call.
bool is_rank_process();

}  // namespace lockstep::testing
