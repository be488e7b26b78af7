// Builds messages from parts. std::format is missing from g++ 12, and base cannot use c10::str.
#pragma once

#include <sstream>
#include <string>

namespace lockstep {

/// Concatenates anything that can be streamed: str("rank ", 1, " of ", 4).
template <class... Parts>
std::string str(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return std::move(out).str();
}

/// Joins streamable items: join(std::vector{1, 2}, ", ") == "1, 2".
template <class Range>
std::string join(const Range& items, const char* separator) {
  std::ostringstream out;
  const char* between = "";
  for (const auto& item : items) {
    out << between << item;
    between = separator;
  }
  return std::move(out).str();
}

}  // namespace lockstep
