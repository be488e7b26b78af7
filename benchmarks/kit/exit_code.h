// How a benchmark's main() ends.
#pragma once

#include <c10/util/Exception.h>

#include <cstdio>
#include <exception>

namespace lockstep::bench {

/// 0 if `work` returns; 1, with its message on the standard error stream, if it throws.
template <class Work>
int exit_code_of(const Work& work) {
  try {
    work();
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "%s\n", error.what_without_backtrace());
    return 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}

}  // namespace lockstep::bench
