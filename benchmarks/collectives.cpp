// all_reduce, all_gather and reduce_scatter of the shared-memory backend, beside gloo and Open MPI. The program starts
// itself as ranks, which measure ours and gloo in turn, then Open MPI's ranks; so round by round, each time fresh
// processes, and nobody waits busily while others are measured. See docs/benchmarks.md.
#include <c10/util/Exception.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <string>

#include "benchmarks/collectives/plan.h"
#include "benchmarks/collectives/rank.h"
#include "benchmarks/collectives/rows.h"
#include "benchmarks/collectives/samples_line.h"
#include "benchmarks/kit/exit_code.h"
#include "benchmarks/kit/peer.h"
#include "benchmarks/kit/processes.h"
#include "benchmarks/kit/progress.h"
#include "benchmarks/kit/report.h"
#include "lockstep/base/str.h"

namespace lockstep::bench {
namespace {

// Empty where CMake did not find Open MPI.
const std::string kMpirun = LOCKSTEP_BENCH_MPIRUN;
const std::string kMpiProgram = LOCKSTEP_BENCH_MPI_PROGRAM;

void measure_ours_and_gloo(const Plan& plan, Operation operation, int world_size, const OnLine& on_line) {
  run_ranks(world_size,
            {"--as-rank", "--ops", name_of(operation), "--sizes", join(plan.sizes, ","), "--backend", plan.backend,
             "--seconds-per-case", std::to_string(plan.seconds_per_case)},
            on_line);
}

std::optional<std::vector<std::string>> measure_mpi(const Plan& plan, Operation operation, int world_size,
                                                    const OnLine& on_line) {
  std::vector<std::string> argv = {kMpirun,
                                   "--oversubscribe",
                                   "--allow-run-as-root",
                                   "-np",
                                   std::to_string(world_size),
                                   kMpiProgram,
                                   name_of(operation),
                                   std::to_string(plan.seconds_per_case / 3)};
  for (const auto bytes : plan.sizes) argv.push_back(std::to_string(bytes));
  return figures_of_peer(str("Open MPI in case ", name_of(operation), " world ", world_size), argv, on_line);
}

/// All rounds of one operation and world.
Measurements measure(const Plan& plan, Operation operation, int world_size) {
  Measurements measurements;
  bool with_mpi = plan.with_mpi;
  for (int round = 0; round < plan.rounds; ++round) {
    const auto where = str(name_of(operation), ", world ", world_size, ", round ", round + 1, " of ", plan.rounds);
    const auto show = [&](std::string_view line) { show_progress(where + ": " + std::string(line.substr(0, 60))); };
    show_progress(where);
    measure_ours_and_gloo(plan, operation, world_size, [&](std::string_view line) {
      show(line);
      take_samples(line, measurements);
    });
    if (!with_mpi) continue;
    const auto figures = measure_mpi(plan, operation, world_size, show);
    with_mpi = figures.has_value();
    for (const auto& line : figures.value_or(std::vector<std::string>())) take_samples(line, measurements);
  }
  // Rows of fewer rounds than the others' would compare times of different minutes.
  if (plan.with_mpi && !with_mpi)
    std::erase_if(measurements, [](const auto& entry) { return entry.first.second == kMpi; });
  clear_progress();
  return measurements;
}

void run(Plan plan, const std::string& output) {
  std::printf("collectives on %s; medians and interquartile ranges of %d rounds\n", describe_machine().c_str(),
              plan.rounds);
  if (plan.with_mpi && kMpiProgram.empty()) {
    std::printf("no rows for Open MPI: mpicc, mpi.h or mpirun was not found (openmpi-bin, libopenmpi-dev)\n");
    plan.with_mpi = false;
  }
  Report report("collectives", output);
  for (const int world_size : plan.worlds) {
    for (const auto operation : plan.operations) {
      const auto measurements = measure(plan, operation, world_size);
      if (!measurements.contains({plan.sizes[0], kZeroCopy})) {
        std::printf("no zero-copy rows: backend %s allocates no tensors\n", plan.backend.c_str());
      }
      for (const auto bytes : plan.sizes) {
        for (auto& row : rows_of(operation, bytes, world_size, measurements)) report.add(std::move(row));
      }
    }
  }
}

}  // namespace
}  // namespace lockstep::bench

int main(int argc, char** argv) {
  using namespace lockstep::bench;
  Plan plan;
  std::string output;
  std::vector<std::string> operations;
  bool without_mpi = false;
  bool is_quick = false;
  bool is_rank = false;
  CLI::App app("all_reduce, all_gather and reduce_scatter beside gloo and Open MPI");
  app.add_option("--output", output, "write the rows to this file, as JSON");
  app.add_option("--ops", operations, "of allreduce, allgather, reducescatter; all by default")
      ->delimiter(',')
      ->check(CLI::IsMember({"allreduce", "allgather", "reducescatter"}));
  auto* sizes = app.add_option("--sizes", plan.sizes, "sizes of the whole tensor: 4,64KiB,25MiB")
                    ->delimiter(',')
                    ->transform(CLI::AsSizeValue(false));
  auto* worlds = app.add_option("--worlds", plan.worlds, "numbers of ranks")->delimiter(',')->check(CLI::Range(2, 64));
  auto* rounds = app.add_option("--rounds", plan.rounds, "how often the peers take turns")->check(CLI::Range(1, 100));
  app.add_option("--seconds-per-case", plan.seconds_per_case, "per round, for ours and gloo together");
  app.add_option("--backend", plan.backend, "the one to compare with gloo and Open MPI");
  app.add_flag("--without-mpi", without_mpi, "leave Open MPI out");
  app.add_flag("--quick", is_quick, "few small cases, to see that it works");
  app.add_flag("--as-rank", is_rank)->group("");
  CLI11_PARSE(app, argc, argv);

  if (is_quick) {
    if (sizes->empty()) plan.sizes = {1 << 10, 1 << 20};
    if (worlds->empty()) plan.worlds = {2};
    if (rounds->empty()) plan.rounds = 1;
    plan.seconds_per_case = 0;
  }
  if (!operations.empty()) plan.operations.clear();
  for (const auto& name : operations) plan.operations.push_back(operation_of(name));
  plan.with_mpi = !without_mpi;
  return exit_code_of([&] { is_rank ? run_rank(plan) : run(plan, output); });
}
