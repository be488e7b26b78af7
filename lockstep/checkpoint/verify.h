// Whether a checkpoint is as it was written. Local: reads all of it.
#pragma once

#include <string>
#include <vector>

#include "lockstep/checkpoint/progress.h"

namespace lockstep::dcp {

/// What is wrong with the folder or file at `path`, each with the names of file and tensor; nothing if all is well.
/// Files that others wrote have no checksums: of these only sizes and headers are checked.
std::vector<std::string> verify(const std::string& path, const ProgressFunction& progress = nullptr);

}  // namespace lockstep::dcp
