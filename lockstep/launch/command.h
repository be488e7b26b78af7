// What exec needs, as values: the program's path and the environment it will see. Reads this process's environment and
// the file system, changes nothing. Internal to launch.
#pragma once

#include <string>
#include <vector>

#include "lockstep/launch/child.h"

namespace lockstep::detail {

/// This process's environment with the changes applied, as NAME=value strings.
std::vector<std::string> changed_environment(const EnvironmentChanges& changes);

/// The path to execute for `name`: itself if it has a slash, else the first executable file of that name in the
/// directories of `path`. Throws std::system_error (ENOENT, or EACCES if only non-executable files were found).
std::string find_program(const std::string& name, const std::string& path);

/// The PATH that lookup should use: that of `changes` if it is changed there, else this process's.
std::string search_path(const EnvironmentChanges& changes);

/// Pointers to the strings with a null at the end, as exec wants them. Borrows `strings`.
std::vector<char*> null_terminated(std::vector<std::string>& strings);

}  // namespace lockstep::detail
