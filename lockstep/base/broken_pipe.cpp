#include "lockstep/base/broken_pipe.h"

#include <signal.h>

namespace lockstep {

// Python's interpreter ignores the signal for every program; C++ programs do not.
void keep_broken_pipes_from_killing() {
  struct sigaction now = {};
  if (::sigaction(SIGPIPE, nullptr, &now) != 0 || now.sa_handler != SIG_DFL) return;
  now.sa_handler = SIG_IGN;
  ::sigaction(SIGPIPE, &now, nullptr);
}

}  // namespace lockstep
