// Says what a benchmark is doing: one line on a terminal that is written over and over, nothing where there is none.
#pragma once

#include <string>

namespace lockstep::bench {

/// Shows `text` instead of the last one.
void show_progress(const std::string& text);

/// Removes the line, before something else is printed.
void clear_progress();

}  // namespace lockstep::bench
