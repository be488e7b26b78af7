#include "lockstep/testing/temp_dir.h"

#include <ftw.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <system_error>

#include "lockstep/base/env.h"

namespace lockstep::testing {
namespace {

int remove_entry(const char* path, const struct stat*, int, struct FTW*) {
  return std::remove(path);
}

}  // namespace

TempDir::TempDir() : path_(env("TMPDIR").value_or("/tmp") + "/lockstep-XXXXXX") {
  if (::mkdtemp(path_.data()) == nullptr) throw std::system_error(errno, std::generic_category(), "mkdtemp " + path_);
}

TempDir::~TempDir() {
  // Not std::filesystem: libtorch exports another compiler's copy of it, and mixing the two crashes.
  ::nftw(path_.c_str(), remove_entry, /*nopenfd=*/8, FTW_DEPTH | FTW_PHYS);
}

}  // namespace lockstep::testing
