#include "lockstep/launch/exit_status.h"

#include <cstring>

#include "lockstep/base/str.h"

namespace lockstep {

std::string ExitStatus::describe() const {
  if (code) return str("exit code ", *code);
  if (!signal) return "still running";
  const char* name = ::sigdescr_np(*signal);
  return str("killed by signal ", *signal, " (", name == nullptr ? "unknown" : name, ")");
}

}  // namespace lockstep
