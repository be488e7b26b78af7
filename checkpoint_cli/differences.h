// In what two checkpoints differ, whoever wrote them. How tensors are divided does not matter, nor steps and numbers of
// ranks: what counts is what would be loaded.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep::checkpoint_cli {

/// The same name, another thing.
struct Difference {
  std::string name = "";
  std::string what = "";  // "[2, 3] and [3, 2]"
};

struct Differences {
  std::vector<std::string> only_in_first = {};
  std::vector<std::string> only_in_second = {};
  std::vector<Difference> changed = {};
  int64_t compared = 0;  // tensors and values that both have

  bool is_none() const { return only_in_first.empty() && only_in_second.empty() && changed.empty(); }
};

/// Elements and numbers that are no further apart than `tolerance` are the same; so is NaN and NaN, and 0 and -0. Reads
/// a few megabytes at a time. Throws if one of the two cannot be read, or a tensor's type is not libtorch's. Local.
Differences compare(const std::string& first, const std::string& second, double tolerance);

/// A line for each.
std::string described(const Differences& differences, const std::string& first, const std::string& second);

}  // namespace lockstep::checkpoint_cli
