// What going on without a rank that died costs: the time from its death to the next finished step, beside starting all
// ranks anew; and a step that could be recovered, beside one that could not. See docs/benchmarks.md.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <map>
#include <sstream>

#include "benchmarks/kit/exit_code.h"
#include "benchmarks/kit/processes.h"
#include "benchmarks/kit/progress.h"
#include "benchmarks/kit/report.h"
#include "benchmarks/kit/training.h"
#include "benchmarks/kit/workload.h"
#include "lockstep/base/str.h"
#include "lockstep/lockstep.h"

namespace lockstep::bench {
namespace {

using Clock = std::chrono::steady_clock;
using Ddp = DistributedDataParallel<std::shared_ptr<Trainable>>;
constexpr int kVictim = 1;  // not the one that serves the store

/// On one host all processes read the same clock.
int64_t now_ns() {
  return Clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

void say(const std::string& what, double milliseconds) {
  std::printf("%s %f\n", what.c_str(), milliseconds);
  std::fflush(stdout);
}

void step(Ddp& ddp, const Workload& workload) {
  forget_gradients(*workload.module);
  ddp.forward(workload.input).pow(2).mean().backward();
}

/// `begin`: when the processes were started.
void run_rank(const std::string& which, int64_t begin, int64_t steps) {
  const auto world = init({.timeout = std::chrono::seconds(60)});
  auto group = world.group();
  const auto workload = make_workload("mlp", 32, world.device());
  Ddp ddp(workload.module, group, {.recoverable = which != "plain"});
  step(ddp, workload);
  if (which == "restart") {
    if (world.rank() == 0) say(which, static_cast<double>(now_ns() - begin) / 1e6);
    return;
  }
  if (which == "recover") {
    for (int i = 0; i < 3; ++i) step(ddp, workload);
    const auto key = std::string("died");
    if (world.rank() == kVictim) {
      world.store()->set(key, std::to_string(now_ns()));
      ::raise(SIGKILL);
    }
    try {
      step(ddp, workload);
    } catch (const c10::DistBackendError&) {
      group = surviving_group(group);
      if (ddp.recover(group) == Recovered::kRepeatStep) step(ddp, workload);
    }
    // Rank 0 serves the store and may end before the others get here: nobody else asks it.
    if (world.rank() == 0) say(which, static_cast<double>(now_ns() - std::stoll(world.store()->get_to_str(key))) / 1e6);
    return;
  }
  for (int64_t i = 0; i < steps; ++i) {
    const auto start = Clock::now();
    step(ddp, workload);
    const std::chrono::duration<double, std::milli> took = Clock::now() - start;
    if (world.rank() == 0) say(which, took.count());
  }
}

Samples samples_of(const std::string& which, int world, int64_t steps) {
  Samples samples;
  run_ranks(world, {"--as-rank", which, "--begin", std::to_string(now_ns()), "--steps", std::to_string(steps)},
            [&](std::string_view line) {
              std::istringstream words{std::string(line)};
              std::string what;
              double milliseconds = 0;
              if (words >> what >> milliseconds && what == which) samples.push_back(milliseconds);
            },
            {.may_be_killed = which == "recover"});
  return samples;
}

void run(int rounds, int64_t steps, const std::string& output) {
  std::printf("recover on %s; medians and interquartile ranges of %d rounds\n", describe_machine().c_str(), rounds);
  Report report("recover", output);
  std::map<std::string, Samples> figures;
  for (int round = 0; round < rounds; ++round) {
    for (const std::string which : {"recover", "restart", "recoverable", "plain"}) {
      show_progress(str("round ", round + 1, " of ", rounds, ": ", which));
      const bool is_death = which.starts_with("re") && which != "recoverable";
      figures[which].push_back(figure_of(samples_of(which, is_death ? 4 : 2, steps)).value);
    }
  }
  clear_progress();
  add_peer_rows(report, {.case_name = "recover world 4", .metric = "ms", .ours = "recover", .peers = {"restart"}},
                figures);
  add_peer_rows(
      report, {.case_name = "step mlp recoverable world 2", .metric = "ms", .ours = "recoverable", .peers = {"plain"}},
      figures);
}

}  // namespace
}  // namespace lockstep::bench

int main(int argc, char** argv) {
  using namespace lockstep::bench;
  int rounds = 5;
  int64_t steps = 30;
  int64_t begin = 0;
  bool is_quick = false;
  std::string rank;
  std::string output;
  CLI::App app("time from a rank's death to the next finished step, beside a restart");
  app.add_option("--output", output, "write the rows to this file, as JSON");
  app.add_option("--rounds", rounds, "how often all take turns")->check(CLI::Range(1, 100));
  app.add_option("--steps", steps, "per round, of those that are not about a death");
  app.add_flag("--quick", is_quick, "one round, to see that it works");
  app.add_option("--as-rank", rank)->group("");
  app.add_option("--begin", begin)->group("");
  CLI11_PARSE(app, argc, argv);
  if (is_quick) {
    rounds = 1;
    steps = 3;
  }
  return exit_code_of([&] { rank.empty() ? run(rounds, steps, output) : run_rank(rank, begin, steps); });
}
