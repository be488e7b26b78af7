#include "lockstep/shm/descriptors.h"

#include <sys/resource.h>

#include <cerrno>
#include <cstring>

#include "lockstep/base/str.h"

namespace lockstep::shm {

std::string out_of_descriptors() {
  rlimit limit = {};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  return str("out of file descriptors: this process may have ", limit.rlim_cur, " open. Raise the limit (ulimit -n).");
}

std::string describe_error(int error) {
  if (error == EMFILE) return out_of_descriptors();
  if (error == ENFILE) return "out of file descriptors: the machine's are all in use (sysctl fs.file-max).";
  return std::strerror(error);
}

}  // namespace lockstep::shm
