// Starting what is measured: this very program once per rank, or another program. Both block until all have ended and
// leave no process behind.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::bench {

/// Called with each line of standard output.
using OnLine = std::function<void(std::string_view line)>;

struct RunOptions {
  int speaker = 0;             // the rank whose lines are delivered
  bool may_be_killed = false;  // ranks that SIGKILL ends have not failed, and the others go on
};

/// Runs this program `world_size` times with `arguments`, each as a rank that lockstep::init() understands. Throws
/// std::runtime_error with a rank's last lines if it fails.
void run_ranks(int world_size, const std::vector<std::string>& arguments, const OnLine& on_line,
               const RunOptions& options = {});

/// Runs another program. Throws std::runtime_error with its last lines if it fails, std::system_error if it cannot be
/// started.
void run_program(const std::vector<std::string>& argv, const OnLine& on_line);

}  // namespace lockstep::bench
