// Names in a checkpoint. Internal to checkpoint.
#pragma once

#include <string>

namespace lockstep::detail {

/// "model" and "head.weight" make "model.head.weight"; either may be empty.
inline std::string full_name(const std::string& entry, const std::string& name) {
  return entry.empty() || name.empty() ? entry + name : entry + "." + name;
}

}  // namespace lockstep::detail
