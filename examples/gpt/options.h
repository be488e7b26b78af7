// What the demo can be told on its command line.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace lockstep::examples {

struct Options {
  int ranks = 0;  // 0: as many as the launcher has started, one without a launcher
  std::string backend = "";
  std::string device = "cpu";
  int64_t steps = 1000;
  int64_t batch_size = 16;  // of all ranks together
  double learning_rate = 3e-3;
  std::string parallel = "ddp";  // "zero" if zero_stage is above 0
  int zero_stage = 0;
  std::string precision = "float32";
  int64_t seed = 1;
  std::string progress = "auto";
  std::string losses = "";  // a file

  bool is_sharded() const { return parallel == "fsdp" || parallel == "hybrid" || parallel == "fsdp+tp"; }
};

/// None if the program shall end at once, with `exit_code`: everything has been said. Local.
std::optional<Options> parse_options(int argc, char** argv, int& exit_code);

}  // namespace lockstep::examples
