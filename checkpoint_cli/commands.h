// The commands of lockstep-checkpoint.
#pragma once

#include <iosfwd>

#include "checkpoint_cli/options.h"

namespace lockstep::checkpoint_cli {

/// The exit code: 0, 1 for what is damaged or differs, 2 for trouble, of which `err` tells.
int run(const Command& command, std::ostream& out, std::ostream& err);

}  // namespace lockstep::checkpoint_cli
