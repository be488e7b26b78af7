#include "lockstep/launch/command.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <sstream>
#include <system_error>

#include "lockstep/base/str.h"

namespace lockstep::detail {

std::vector<std::string> changed_environment(const EnvironmentChanges& changes) {
  std::vector<std::string> result;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string text = *entry;
    if (!changes.contains(text.substr(0, text.find('=')))) result.push_back(text);
  }
  for (const auto& [name, value] : changes) {
    if (value) result.push_back(str(name, "=", *value));
  }
  return result;
}

std::string search_path(const EnvironmentChanges& changes) {
  constexpr const char* kFallback = "/usr/local/bin:/usr/bin:/bin";
  if (const auto changed = changes.find("PATH"); changed != changes.end()) return changed->second.value_or(kFallback);
  const char* path = std::getenv("PATH");
  return path == nullptr ? kFallback : path;
}

std::string find_program(const std::string& name, const std::string& path) {
  if (name.find('/') != std::string::npos) return name;
  int error = ENOENT;
  std::istringstream directories(path);
  for (std::string directory; !name.empty() && std::getline(directories, directory, ':');) {
    const std::string candidate = str(directory.empty() ? "." : directory, "/", name);
    struct stat file {};
    if (::stat(candidate.c_str(), &file) != 0 || !S_ISREG(file.st_mode)) continue;
    if (::access(candidate.c_str(), X_OK) == 0) return candidate;
    error = EACCES;
  }
  throw std::system_error(error, std::generic_category(), str("cannot start '", name, "'"));
}

std::vector<char*> null_terminated(std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  pointers.reserve(strings.size() + 1);
  for (auto& text : strings) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

}  // namespace lockstep::detail
