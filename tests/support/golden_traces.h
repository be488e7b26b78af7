// Traces of training with Python's fully_shard, as tests/oracle/fsdp/golden_traces.py writes them and says what is in
// them.
#pragma once

#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "lockstep/testing/run.h"

namespace lockstep::golden_traces {

struct UnitEvent {
  std::string kind;   // "unshard", "reshard", "post_backward"
  std::string state;  // "forward", "backward"
  std::string unit;   // "." is the root

  bool operator==(const UnitEvent&) const = default;
};

struct Step {
  std::vector<double> losses;                            // by rank
  std::map<std::string, std::vector<double>> gradients;  // by parameter: sum, of magnitudes, times a ramp
  std::vector<UnitEvent> events;
};

/// By model.
using Traces = std::map<std::string, std::vector<Step>>;

inline Traces read_traces(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw testing::CheckFailure("cannot read " + path);
  Traces traces;
  std::vector<Step>* steps = nullptr;
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    const auto numbers = [&] {
      std::vector<double> found;
      for (double number = 0; words >> number;) found.push_back(number);
      return found;
    };
    std::string kind;
    std::string name;
    words >> kind >> name;
    if (kind == "model") {
      steps = &traces[name];
    } else if (kind == "step") {
      steps->push_back({.losses = numbers(), .gradients = {}, .events = {}});
    } else if (kind == "grad") {
      steps->back().gradients[name] = numbers();
    } else {
      UnitEvent event{.kind = name, .state = "", .unit = ""};
      words >> event.state >> event.unit;
      steps->back().events.push_back(std::move(event));
    }
  }
  return traces;
}

}  // namespace lockstep::golden_traces
