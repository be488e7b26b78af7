#include "benchmarks/collectives/samples_line.h"

#include <cstdio>
#include <sstream>

namespace lockstep::bench {

void print_samples(Operation operation, int64_t bytes, const std::string& contender, const Samples& seconds) {
  std::printf("samples %s %lld %s", name_of(operation).c_str(), static_cast<long long>(bytes), contender.c_str());
  for (const double value : seconds) std::printf(" %.9g", value);
  std::printf("\n");
  std::fflush(stdout);
}

void take_samples(std::string_view line, Measurements& measurements) {
  std::istringstream words{std::string(line)};
  std::string mark;
  std::string operation;
  int64_t bytes = 0;
  std::string contender;
  if (!(words >> mark >> operation >> bytes >> contender) || mark != "samples") return;
  auto& samples = measurements[{bytes, contender}];
  for (double seconds = 0; words >> seconds;) samples.push_back(seconds);
}

}  // namespace lockstep::bench
