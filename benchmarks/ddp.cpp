// Training steps of DistributedDataParallel over shared memory, beside libtorch's c10d::Reducer over gloo in the same
// binary, and Python's DistributedDataParallel over gloo. Round by round, each time fresh processes; within a round the
// C++ ones take turns step by step. See docs/benchmarks.md.
#include <c10/util/Exception.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <map>
#include <sstream>
#include <string>

#include "benchmarks/ddp/rank.h"
#include "benchmarks/kit/processes.h"
#include "benchmarks/kit/progress.h"
#include "benchmarks/kit/report.h"
#include "lockstep/base/str.h"

namespace lockstep::bench {
namespace {

// Empty where CMake found no Python with torch.
const std::string kPython = LOCKSTEP_BENCH_PYTHON;
const std::string kPeerScript = LOCKSTEP_BENCH_PYTHON_PEER;
const std::string kLauncher = LOCKSTEP_BENCH_RUN;

struct Plan {
  std::vector<std::string> models = {"mlp", "300-layers", "gpt"};
  std::vector<int> worlds = {1, 2, 4};
  int rounds = 5;
  double seconds = 1.5;
  int64_t width = 32;
  bool has_python = true;
};

/// Samples and peaks by contender.
struct Measured {
  std::map<std::string, Samples> steps;  // of one round
  std::map<std::string, double> peaks;

  void take(std::string_view line) {
    std::istringstream words{std::string(line)};
    std::string kind;
    std::string name;
    double value = 0;
    if (!(words >> kind >> name >> value)) return;
    if (kind == "sample") steps[name].push_back(value);
    if (kind == "peak") peaks[name] = value;
  }
};

std::vector<std::string> arguments_for(const Plan& plan, const std::string& model, const std::string& contenders,
                                       double seconds) {
  return {"--model",      model,      "--width",   std::to_string(plan.width),
          "--contenders", contenders, "--seconds", std::to_string(seconds)};
}

void run_cpp(const Plan& plan, const std::string& model, int world, const std::string& contenders, double seconds,
             const OnLine& on_line) {
  auto arguments = arguments_for(plan, model, contenders, seconds);
  arguments.insert(arguments.begin(), "--as-rank");
  run_ranks(world, arguments, on_line);
}

void run_python(const Plan& plan, const std::string& model, int world, const std::string& contenders, double seconds,
                const OnLine& on_line) {
  std::vector<std::string> argv = {kLauncher, "-n", std::to_string(world), "--no-prefix", "--", kPython, kPeerScript};
  const auto arguments = arguments_for(plan, model, contenders, seconds);
  argv.insert(argv.end(), arguments.begin(), arguments.end());
  run_program(argv, on_line);
}

/// Per round, so that the spread is that between rounds.
struct Rounds {
  std::map<std::string, Samples> step;
  std::map<std::string, Samples> overhead;
  std::map<std::string, Samples> peak;
};

Rounds measure(const Plan& plan, const std::string& model, int world) {
  Rounds rounds;
  for (int round = 0; round < plan.rounds; ++round) {
    Measured measured;
    show_progress(str(model, ", world ", world, ", round ", round + 1, " of ", plan.rounds));
    const auto on_line = [&](std::string_view line) { measured.take(line); };
    run_cpp(plan, model, world, "local,ours,c10d-reducer", plan.seconds, on_line);
    if (plan.has_python) run_python(plan, model, world, "python-local,python-ddp", plan.seconds, on_line);
    for (const auto& [name, samples] : measured.steps) rounds.step[name].push_back(figure_of(samples).value);
    const auto difference = [&](const std::string& name, const std::string& local) {
      if (!measured.steps.contains(name)) return;
      // Below the clock's noise there is nothing to compare.
      constexpr double kLeast = 1e-3;
      rounds.overhead[name].push_back(
          std::max(kLeast, figure_of(measured.steps[name]).value - figure_of(measured.steps[local]).value));
    };
    difference("ours", "local");
    difference("c10d-reducer", "local");
    difference("python-ddp", "python-local");
    if (round > 0) continue;
    for (const char* name : {"ours", "c10d-reducer"}) run_cpp(plan, model, world, name, 0, on_line);
    for (const auto& [name, bytes] : measured.peaks) rounds.peak[name].push_back(bytes / (1 << 20));
  }
  clear_progress();
  return rounds;
}

std::optional<double> goal_of(const std::string& case_name, const std::string& peer) {
  if (case_name == "overhead mlp world 2" && peer == "python-ddp") return 1 / 0.3;
  if (case_name == "host per parameter 300-layers world 1" && peer == "c10d-reducer") return 2;
  return std::nullopt;
}

void add_rows(Report& report, const std::string& case_name, const std::string& metric,
              const std::map<std::string, Samples>& figures, double factor = 1) {
  const auto scaled = [&](Samples samples) {
    for (auto& sample : samples) sample *= factor;
    return figure_of(std::move(samples));
  };
  for (const char* peer : {"python-ddp", "c10d-reducer", "local"}) {
    if (!figures.contains(peer) || !figures.contains("ours")) continue;
    report.add({.case_name = case_name,
                .metric = metric,
                .ours = scaled(figures.at("ours")),
                .peer = peer,
                .theirs = scaled(figures.at(peer)),
                .goal = goal_of(case_name, peer)});
  }
}

void run(Plan plan, const std::string& output) {
  std::printf("ddp on %s; medians and interquartile ranges of %d rounds\n", describe_machine().c_str(), plan.rounds);
  if (plan.has_python && kPython.empty()) {
    std::printf("no rows for Python: no Python with torch was found\n");
    plan.has_python = false;
  }
  Report report("ddp");
  for (const auto& model : plan.models) {
    for (const int world : plan.worlds) {
      const auto rounds = measure(plan, model, world);
      const auto where = str(model, " world ", world);
      add_rows(report, "overhead " + where, "ms", rounds.overhead);
      add_rows(report, "step " + where, "ms", rounds.step);
      if (model == "300-layers") add_rows(report, "host per parameter " + where, "us", rounds.overhead, 1000.0 / 600);
      add_rows(report, "peak memory " + where, "MiB", rounds.peak);
    }
  }
  if (!output.empty()) report.write_json(output);
}

}  // namespace
}  // namespace lockstep::bench

int main(int argc, char** argv) {
  using namespace lockstep::bench;
  Plan plan;
  RankPlan rank;
  std::string output;
  bool without_python = false;
  bool is_quick = false;
  bool is_rank = false;
  CLI::App app("training steps of DistributedDataParallel beside c10d::Reducer and Python's");
  app.add_option("--output", output, "write the rows to this file, as JSON");
  auto* models = app.add_option("--models", plan.models, "of mlp, 300-layers, gpt")
                     ->delimiter(',')
                     ->check(CLI::IsMember({"mlp", "300-layers", "gpt"}));
  auto* worlds = app.add_option("--worlds", plan.worlds, "numbers of ranks")->delimiter(',')->check(CLI::Range(1, 64));
  auto* rounds = app.add_option("--rounds", plan.rounds, "how often the peers take turns")->check(CLI::Range(1, 100));
  app.add_option("--width", plan.width, "of the 300 layers");
  app.add_option("--seconds", plan.seconds, "per round and program");
  app.add_flag("--without-python", without_python, "leave Python out");
  app.add_flag("--quick", is_quick, "one small case, to see that it works");
  app.add_flag("--as-rank", is_rank)->group("");
  app.add_option("--model", rank.which.model)->group("");
  app.add_option("--contenders", rank.contenders)->delimiter(',')->group("");
  CLI11_PARSE(app, argc, argv);

  if (is_quick) {
    if (models->empty()) plan.models = {"300-layers"};
    if (worlds->empty()) plan.worlds = {2};
    if (rounds->empty()) plan.rounds = 1;
    plan.seconds = 0;
  }
  plan.has_python = !without_python;
  rank.which.width = plan.width;
  rank.seconds = plan.seconds;
  try {
    is_rank ? run_rank(rank) : run(plan, output);
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "%s\n", error.what_without_backtrace());
    return 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
