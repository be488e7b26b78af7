#include "lockstep/base/env.h"

#include <charconv>
#include <cstdlib>
#include <stdexcept>

#include "lockstep/base/str.h"

namespace lockstep {

std::optional<std::string> env(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  if (value == nullptr || *value == '\0') return std::nullopt;
  return value;
}

long parse_integer(const std::string& name, const std::string& value) {
  long number = 0;
  const char* end = value.data() + value.size();
  const auto [stop, error] = std::from_chars(value.data(), end, number);
  if (error != std::errc() || stop != end) {
    throw std::invalid_argument(str(name, "='", value, "' is not an integer"));
  }
  return number;
}

std::optional<long> env_integer(const Environment& environment, const std::string& name) {
  const auto value = environment(name);
  if (!value) return std::nullopt;
  return parse_integer(name, *value);
}

}  // namespace lockstep
