#include "lockstep/base/signal_sets.h"

#include <cstdlib>
#include <fstream>

namespace lockstep {

bool is_in_signal_set(const std::string& status_file, const std::string& name, int signal) {
  std::ifstream file(status_file);
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with(name + ":")) continue;
    const auto set = std::strtoull(line.c_str() + name.size() + 1, nullptr, 16);
    return ((set >> (signal - 1)) & 1U) != 0;
  }
  return false;
}

}  // namespace lockstep
