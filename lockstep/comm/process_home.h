// Which process a rank is, so that others on its host can tell whether it is gone or only late. Internal to comm.
#pragma once

#include <string>

namespace lockstep::detail {

/// This process, in words that is_gone() of any other understands.
std::string process_home();

/// The process ended, and nothing of it will come any more. False if that cannot be seen from here: on another host, or
/// in another container.
bool is_gone(const std::string& home);

}  // namespace lockstep::detail
