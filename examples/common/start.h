// How a demo becomes a rank: under the launcher that started it, under lockstep-run if it asks for ranks itself, or
// alone.
#pragma once

#include <lockstep/comm/world.h>

#include <functional>

#include "examples/common/options.h"

namespace lockstep::examples {

/// Calls `train` with this rank's world, and returns the exit code of the program: errors are printed behind `program`.
/// Does not return where it becomes lockstep-run, which starts the same command as its ranks.
int start(const char* program, const TrainingOptions& options, int argc, char** argv,
          const std::function<void(const World& world)>& train);

}  // namespace lockstep::examples
