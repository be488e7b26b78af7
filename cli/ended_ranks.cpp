#include "cli/ended_ranks.h"

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "lockstep/base/env.h"
#include "lockstep/base/str.h"

namespace lockstep::cli {

EndedRanks::EndedRanks() : path_(env("TMPDIR").value_or("/tmp") + "/lockstep-run-XXXXXX") {
  if (::mkdtemp(path_.data()) == nullptr) path_.clear();
}

EndedRanks::~EndedRanks() {
  std::error_code ignored;
  if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
}

void EndedRanks::add(int rank, const ExitStatus& status) const {
  if (path_.empty()) return;
  // Whole or not at all: ranks read it at any time.
  const auto name = str(path_, "/", rank);
  std::ofstream(name + ".part") << status.describe();
  std::rename((name + ".part").c_str(), name.c_str());
}

}  // namespace lockstep::cli
