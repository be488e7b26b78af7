// What every demo can be told on its command line.
#pragma once

#include <cstdint>
#include <string>

namespace CLI {
class App;
}

namespace lockstep::examples {

struct TrainingOptions {
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
  std::string losses = "";      // a file
  std::string checkpoint = "";  // a folder
  int64_t checkpoint_every = 100;
  int64_t die_at = 0;  // a step; 0 for none

  bool is_sharded() const { return parallel == "fsdp" || parallel == "hybrid" || parallel == "fsdp+tp"; }
};

/// Lets `app` fill them. Both must live until parse() returns. Local.
void add_options(CLI::App& app, TrainingOptions& options);

/// False if the program shall end at once, with `exit_code`: everything has been said. Local.
bool parse(CLI::App& app, TrainingOptions& options, int argc, char** argv, int& exit_code);

}  // namespace lockstep::examples
