// What to say when the kernel refuses a file descriptor. Internal to shm.
#pragma once

#include <string>

namespace lockstep::shm {

/// "out of file descriptors: this process may have 64 open. Raise the limit (ulimit -n)."
std::string out_of_descriptors();

/// What `error`, an errno, means, with the remedy if there is one.
std::string describe_error(int error);

}  // namespace lockstep::shm
