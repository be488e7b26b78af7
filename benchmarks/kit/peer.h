// Running others' programs beside ours. What goes wrong in one of them costs its own figures at most, never the
// benchmark: others' processes may abort while they end, and minutes of measuring would go with them.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "benchmarks/kit/processes.h"

namespace lockstep::bench {

/// The line by which a peer says that all its figures are out. What becomes of it afterwards does not matter.
inline constexpr std::string_view kDelivered = "delivered";

/// Runs the program and returns what it printed before kDelivered. One that ends without having delivered is started
/// once more; if that does not help, a line on standard output says that rows of `peer` are missing and why, and
/// nothing is returned. `on_line` sees lines as they come, also those of a run that is thrown away. Blocks.
std::optional<std::vector<std::string>> figures_of_peer(const std::string& peer, const std::vector<std::string>& argv,
                                                        const OnLine& on_line = {});

/// Whether CMake found a Python with torch.
bool has_python();

/// The command that runs `script` by that Python, once per rank.
std::vector<std::string> python_ranks(int world_size, const std::string& script,
                                      const std::vector<std::string>& arguments);

}  // namespace lockstep::bench
