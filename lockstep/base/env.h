// Reads environment variables. A value that does not parse is an error that names its variable.
#pragma once

#include <functional>
#include <optional>
#include <string>

namespace lockstep {

/// Where variables come from: the process environment, or a table in tests.
using Environment = std::function<std::optional<std::string>(const std::string& name)>;

/// Reads the real environment. An empty variable counts as unset.
std::optional<std::string> env(const std::string& name);

/// Parses a whole decimal integer; throws std::invalid_argument naming `name` and the value.
long parse_integer(const std::string& name, const std::string& value);

/// Parses variable `name` of `environment`; nullopt if unset, std::invalid_argument if not an integer.
std::optional<long> env_integer(const Environment& environment, const std::string& name);

}  // namespace lockstep
