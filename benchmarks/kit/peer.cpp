#include "benchmarks/kit/peer.h"

#include <cstdio>
#include <exception>

#include "benchmarks/kit/progress.h"

namespace lockstep::bench {
namespace {

constexpr int kAttempts = 2;

// Empty where CMake found no Python with torch.
const std::string kPython = LOCKSTEP_BENCH_PYTHON;
const std::string kLauncher = LOCKSTEP_BENCH_RUN;

struct Attempt {
  std::vector<std::string> lines = {};
  bool has_delivered = false;
  std::string problem = "it ended without having delivered all figures";
};

Attempt attempt(const std::vector<std::string>& argv, const OnLine& on_line) {
  Attempt result;
  try {
    run_program(argv, [&](std::string_view line) {
      if (line == kDelivered) result.has_delivered = true;
      if (result.has_delivered) return;
      if (on_line) on_line(line);
      result.lines.emplace_back(line);
    });
  } catch (const std::exception& error) {
    result.problem = error.what();
  }
  return result;
}

}  // namespace

std::optional<std::vector<std::string>> figures_of_peer(const std::string& peer, const std::vector<std::string>& argv,
                                                        const OnLine& on_line) {
  std::string problem;
  for (int i = 0; i < kAttempts; ++i) {
    auto result = attempt(argv, on_line);
    if (result.has_delivered) return std::move(result.lines);
    problem = std::move(result.problem);
  }
  clear_progress();
  std::printf("no rows for %s here: it failed %d times, at last with: %s\n", peer.c_str(), kAttempts, problem.c_str());
  std::fflush(stdout);
  return std::nullopt;
}

bool has_python() {
  return !kPython.empty();
}

std::vector<std::string> python_ranks(int world_size, const std::string& script,
                                      const std::vector<std::string>& arguments) {
  std::vector<std::string> argv = {kLauncher, "-n",  std::to_string(world_size), "--no-prefix", "--", kPython,
                                   "-B",      script};
  argv.insert(argv.end(), arguments.begin(), arguments.end());
  return argv;
}

}  // namespace lockstep::bench
