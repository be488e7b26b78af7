#include "benchmarks/kit/processes.h"

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <memory>
#include <stdexcept>

#include "lockstep/base/env.h"
#include "lockstep/base/str.h"
#include "lockstep/launch/job.h"
#include "lockstep/launch/launch_environment.h"
#include "lockstep/launch/port.h"

namespace lockstep::bench {
namespace {

/// How long a program may take; tests, which run little, set less.
std::chrono::milliseconds time_limit() {
  constexpr std::int64_t kUsual = 600;
  return std::chrono::seconds(env_integer(env, "LOCKSTEP_BENCH_TIMEOUT").value_or(kUsual));
}

std::string own_program() {
  const std::unique_ptr<char, decltype(&std::free)> path(::realpath("/proc/self/exe", nullptr), &std::free);
  if (!path) throw std::runtime_error("cannot find the running program");
  return path.get();
}

void run(std::vector<RankSpec> ranks, const OnLine& on_line, const RunOptions& run_options = {}) {
  JobOptions options;
  options.ranks = std::move(ranks);
  options.timeout = time_limit();
  options.on_line = [&](int rank, OutputStream stream, std::string_view line) {
    if (rank == run_options.speaker && stream == OutputStream::kStdout) on_line(line);
  };
  options.is_failure = [&](const ExitStatus& status) {
    return !status.ok() && !(run_options.may_be_killed && status.signal == SIGKILL);
  };
  const auto result = Job(options).run();
  if (!result.first_failed && !result.timed_out) return;
  const auto& failed = result.at(result.first_failed.value_or(0));
  throw std::runtime_error(str(join(options.ranks[0].argv, " "), ": rank ", failed.rank,
                               result.timed_out ? " did not end in time" : " failed", ", ", failed.status.describe(),
                               "\n", join(failed.last_lines, "\n")));
}

}  // namespace

void run_ranks(int world_size, const std::vector<std::string>& arguments, const OnLine& on_line,
               const RunOptions& options) {
  const PortReservation port;
  const LaunchLayout layout{.ranks_per_node = world_size, .master_port = port.port()};
  const auto omp_threads = omp_threads_per_rank(env("OMP_NUM_THREADS").has_value(), world_size, available_cores());
  const auto program = own_program();
  std::vector<RankSpec> ranks;
  for (int rank = 0; rank < world_size; ++rank) {
    RankSpec spec{.rank = rank, .argv = {program}, .environment = variables_for_rank(layout, rank)};
    spec.argv.insert(spec.argv.end(), arguments.begin(), arguments.end());
    if (omp_threads) spec.environment["OMP_NUM_THREADS"] = std::to_string(*omp_threads);
    ranks.push_back(std::move(spec));
  }
  run(std::move(ranks), on_line, options);
}

void run_program(const std::vector<std::string>& argv, const OnLine& on_line) {
  run({{.rank = 0, .argv = argv, .environment = {}}}, on_line);
}

}  // namespace lockstep::bench
