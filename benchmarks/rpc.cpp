// Remote calls beside Python's: round trips, many calls at once, a backward through a remote module, the hybrid
// example's rounds, and how soon a caller learns that its callee was killed. Round by round, each contender in fresh
// processes. See docs/benchmarks.md.
#include <c10/util/Exception.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <sstream>

#include "benchmarks/kit/exit_code.h"
#include "benchmarks/kit/peer.h"
#include "benchmarks/kit/processes.h"
#include "benchmarks/kit/progress.h"
#include "benchmarks/kit/training.h"
#include "benchmarks/rpc/worker.h"
#include "lockstep/base/str.h"

namespace lockstep::bench {
namespace {

const std::string kMemory = "memory";
const std::string kTensorPipe = "tensorpipe";
const std::string kPythonRpc = "python-rpc";

// By contender.
const std::map<std::string, rpc::Agent> kAgents = {{kMemory, rpc::Agent::kShm}, {kTensorPipe, rpc::Agent::kTensorPipe}};

struct Plan {
  std::vector<std::string> cases = {"calls", "hybrid", "kill"};
  int rounds = 5;
  int samples = 20;
  std::vector<std::string> transports = {};
  bool with_python = true;
};

int world_of(const std::string& which) {
  return which == "hybrid" ? 6 : 2;
}

using Lines = std::map<std::string, Samples>;  // milliseconds by what was measured

void take(Lines& lines, std::string_view line) {
  std::istringstream words{std::string(line)};
  std::string what;
  double milliseconds = 0;
  if (words >> what >> milliseconds) lines[what].push_back(milliseconds);
}

Lines of_contender(const Plan& plan, const std::string& which, const std::string& contender) {
  std::vector<std::string> arguments = {
      "--as-worker", "--cases", which, "--agent", contender, "--samples", std::to_string(plan.samples)};
  if (contender == kTensorPipe && !plan.transports.empty()) {
    arguments.insert(arguments.end(), {"--transports", join(plan.transports, ",")});
  }
  Lines lines;
  run_ranks(world_of(which), arguments, [&](std::string_view line) { take(lines, line); },
            {.speaker = caller_of(which), .may_be_killed = which == "kill"});
  return lines;
}

std::optional<Lines> of_python(const std::string& which, int samples) {
  const auto figures = figures_of_peer(
      str("Python in case ", which),
      python_ranks(world_of(which), LOCKSTEP_BENCH_PYTHON_PEER, {"--which", which, "--samples", str(samples)}));
  if (!figures) return std::nullopt;
  Lines lines;
  for (const auto& line : *figures) take(lines, line);
  return lines;
}

/// All rounds of one case; a round's figure is its median.
Measured measure(const Plan& plan, const std::string& which) {
  Measured measured;
  const auto keep = [&](const std::string& contender, const Lines& lines) {
    for (const auto& [what, samples] : lines) measured[what][contender].push_back(figure_of(samples).value);
  };
  bool with_python = plan.with_python;
  for (int round = 0; round < plan.rounds; ++round) {
    const auto where = str(which, ", round ", round + 1, " of ", plan.rounds, ": ");
    for (const auto& [contender, agent] : kAgents) {
      show_progress(where + contender);
      keep(contender, of_contender(plan, which, contender));
    }
    if (!with_python) continue;
    show_progress(where + kPythonRpc);
    const auto lines = of_python(which, plan.samples);
    with_python = lines.has_value();
    if (lines) keep(kPythonRpc, *lines);
  }
  // Rows of fewer rounds than the others' would compare times of different minutes.
  if (!with_python) {
    for (auto& [what, contenders] : measured) contenders.erase(kPythonRpc);
  }
  clear_progress();
  return measured;
}

struct RowSpec {
  std::string which;
  std::string what;
  std::string case_name;
  double goal = 0;             // against Python; 0: none
  double tensorpipe_goal = 0;  // the same through TensorPipe, in a row of its own
  double scale = 1;
};
const std::vector<RowSpec> kRows = {
    {.which = "calls", .what = "round-trip-8x64", .case_name = "round trip 8x64", .goal = 20, .tensorpipe_goal = 3},
    {.which = "calls", .what = "round-trip-1MiB", .case_name = "round trip 1 MiB"},
    {.which = "calls", .what = "round-trip-64MiB", .case_name = "round trip 64 MiB"},
    {.which = "calls", .what = "in-flight", .case_name = str("in flight ", kInFlight), .scale = 1.0 / kInFlight},
    {.which = "calls", .what = "forward-backward", .case_name = "forward+backward remote linear", .goal = 5},
    {.which = "hybrid", .what = "hybrid", .case_name = "hybrid steps", .goal = 3},
    {.which = "kill", .what = "kill", .case_name = "time to error after kill"}};

void add_rows(Report& report, const RowSpec& spec, const Measured& measured) {
  const auto goals = [](double goal) {
    return goal > 0 ? std::map<std::string, double>{{kPythonRpc, goal}} : std::map<std::string, double>();
  };
  const auto& figures = measured.at(spec.what);
  add_peer_rows(report,
                {.case_name = spec.case_name,
                 .metric = "ms",
                 .ours = kMemory,
                 .peers = {kPythonRpc, kTensorPipe},
                 .goals = goals(spec.goal),
                 .scale = spec.scale},
                figures);
  if (spec.tensorpipe_goal == 0) return;
  add_peer_rows(report,
                {.case_name = str(spec.case_name, " ", kTensorPipe),
                 .metric = "ms",
                 .ours = kTensorPipe,
                 .peers = {kPythonRpc},
                 .goals = goals(spec.tensorpipe_goal),
                 .scale = spec.scale},
                figures);
}

/// Of ours alone: lookups that are asked for one batch early, beside the same in turn.
void add_lookups(Report& report, const Measured& measured) {
  add_peer_rows(
      report, {.case_name = "lookups one batch ahead", .metric = "ms", .ours = "ahead", .peers = {"in turn"}},
      {{"ahead", measured.at("lookups-ahead").at(kMemory)}, {"in turn", measured.at("lookups-in-turn").at(kMemory)}});
}

void run(Plan plan, const std::string& output) {
  std::printf("rpc on %s; medians and interquartile ranges of %d rounds\n", describe_machine().c_str(), plan.rounds);
  if (plan.with_python && !has_python()) {
    std::printf("no rows for Python: no Python with torch was found\n");
    plan.with_python = false;
  }
  Report report("rpc", output);
  for (const auto& which : plan.cases) {
    const auto measured = measure(plan, which);
    for (const auto& spec : kRows) {
      if (spec.which == which) add_rows(report, spec, measured);
    }
    if (which == "calls") add_lookups(report, measured);
  }
}

}  // namespace
}  // namespace lockstep::bench

int main(int argc, char** argv) {
  using namespace lockstep::bench;
  Plan plan;
  WorkerPlan worker;
  std::string output;
  std::string agent = kMemory;
  bool without_python = false;
  bool is_quick = false;
  bool is_worker = false;
  CLI::App app("remote calls beside Python's");
  app.add_option("--output", output, "write the rows to this file, as JSON");
  app.add_option("--cases", plan.cases, "of calls, hybrid, kill; all by default")
      ->delimiter(',')
      ->check(CLI::IsMember(plan.cases));
  auto* rounds = app.add_option("--rounds", plan.rounds, "how often the peers take turns")->check(CLI::Range(1, 100));
  auto* samples = app.add_option("--samples", plan.samples, "per round and contender")->check(CLI::Range(1, 1000));
  app.add_option("--transports", plan.transports, "of the contender tensorpipe, such as uv; its own choice by default")
      ->delimiter(',');
  app.add_flag("--without-python", without_python, "leave Python out");
  app.add_flag("--quick", is_quick, "few samples of everything, to see that it works");
  app.add_flag("--as-worker", is_worker)->group("");
  app.add_option("--agent", agent)->group("")->check(CLI::IsMember(kAgents));
  CLI11_PARSE(app, argc, argv);

  if (is_quick) {
    if (rounds->empty()) plan.rounds = 1;
    if (samples->empty()) plan.samples = 1;
  }
  plan.with_python = !without_python;
  worker = {
      .which = plan.cases.at(0), .agent = kAgents.at(agent), .transports = plan.transports, .samples = plan.samples};
  return exit_code_of([&] { is_worker ? run_worker(worker) : run(plan, output); });
}
