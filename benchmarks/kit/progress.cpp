#include "benchmarks/kit/progress.h"

#include <unistd.h>

#include <cstdio>

namespace lockstep::bench {

void show_progress(const std::string& text) {
  if (::isatty(STDERR_FILENO) == 1) std::fprintf(stderr, "\r\033[K%s", text.c_str());
}

void clear_progress() {
  show_progress("");
}

}  // namespace lockstep::bench
