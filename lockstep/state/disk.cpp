#include "lockstep/state/disk.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

namespace lockstep::detail {
namespace {

bool flush(const std::string& path, int flags) {
  const int file = ::open(path.c_str(), flags | O_CLOEXEC);
  if (file < 0) return false;
  const bool is_flushed = ::fsync(file) == 0;
  const int problem = errno;
  ::close(file);
  errno = problem;
  return is_flushed;
}

}  // namespace

void flush_folder_of(const std::string& file) {
  // Some file systems cannot, and there is nothing to undo by then: not an error.
  const auto slash = file.rfind('/');
  flush(slash == std::string::npos ? "." : file.substr(0, slash + 1), O_RDONLY | O_DIRECTORY);
}

void flush_to_disk(const std::string& file) {
  TORCH_CHECK(flush(file, O_RDONLY), "[lockstep/state] cannot write ", file, ": ", std::strerror(errno));
  flush_folder_of(file);
}

void rename_on_disk(const std::string& from, const std::string& to) {
  if (std::rename(from.c_str(), to.c_str()) != 0) {
    const int problem = errno;
    ::unlink(from.c_str());
    TORCH_CHECK(false, "[lockstep/state] cannot write ", to, ": ", std::strerror(problem));
  }
  flush_folder_of(to);
}

}  // namespace lockstep::detail
