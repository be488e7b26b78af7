// What one process of the benchmark `rpc` does: one of them calls and prints what it took, the others serve.
// python_peer.py does the same in Python.
#pragma once

#include <string>
#include <vector>

#include "lockstep/rpc/rpc.h"

namespace lockstep::bench {

inline constexpr int kInFlight = 100;

struct WorkerPlan {
  std::string which = "calls";  // "calls" and "kill" on 2 ranks, "hybrid" on 6
  rpc::Agent agent = rpc::Agent::kShm;
  std::vector<std::string> transports = {};  // of TensorPipe; empty: its own choice
  int samples = 1;
};

/// Who prints: the hybrid example's master is its last rank.
int caller_of(const std::string& which);

/// Prints lines "WHAT MILLISECONDS", a line per sample: of one call, after one sample that is not timed. Of "kill"
/// there is one sample, and the callee ends by SIGKILL.
void run_worker(const WorkerPlan& plan);

}  // namespace lockstep::bench
