// What the demo can be told on its command line.
#pragma once

#include <optional>
#include <string>

#include "examples/common/options.h"

namespace lockstep::examples {

struct LlamaOptions : TrainingOptions {
  std::string config = "";  // a config.json, of a model with random weights
  std::string model = "";   // a Hugging Face folder
  std::string save = "";    // another one
  std::string tokens = "";  // a file of numbers
  std::string text = "";    // a file of bytes
  int64_t context = 128;
  int64_t write = 200;
  bool checkpoint_activations = false;
};

/// None if the program shall end at once, with `exit_code`: everything has been said. Local.
std::optional<LlamaOptions> parse_options(int argc, char** argv, int& exit_code);

}  // namespace lockstep::examples
