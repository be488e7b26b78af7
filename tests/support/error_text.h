// What an action throws, as text.
#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <string>

namespace lockstep::error_text {

/// Empty if it throws nothing.
template <class Action>
std::string error_of(const Action& action) {
  try {
    action();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

}  // namespace lockstep::error_text
