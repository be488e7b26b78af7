// What interception costs per operator: nothing where no tensor carries the key, and at most a microsecond where one
// does, or a scope is open. Operators that cross no rank; the peer is the same operator in plain libtorch. Whether the
// fallback is registered at all is compared between fresh processes, the rest turn by turn in one. See
// docs/benchmarks.md.
#include <ATen/Parallel.h>
#include <ATen/ops/add.h>
#include <ATen/ops/ones.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <functional>
#include <map>
#include <string>

#include "benchmarks/kit/exit_code.h"
#include "benchmarks/kit/processes.h"
#include "benchmarks/kit/progress.h"
#include "benchmarks/kit/report.h"
#include "lockstep/intercept/key.h"
#include "lockstep/intercept/operator_call.h"
#include "lockstep/intercept/operator_counter.h"
#include "lockstep/intercept/operator_scope.h"
#include "lockstep/intercept/storage_owner.h"

namespace lockstep::bench {
namespace {

constexpr int kOperatorsPerSample = 200;  // short enough to run undisturbed as a rule

struct Plan {
  int rounds = 5;
  int samples = 400;
};

class Idle : public StorageOwner {
 public:
  void before_operator(OperatorCall&, c10::ArrayRef<TouchedTensor>) override {}
};

class GoingOn : public OperatorScope {
 public:
  GoingOn() : OperatorScope(Sees::kProgram) {}
  void on_operator(OperatorCall& call) override { call.proceed(); }
};

/// Milliseconds per operator.
double time_of(const at::Tensor& a, const at::Tensor& b) {
  for (int i = 0; i < kOperatorsPerSample / 10; ++i) at::add(a, b);
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < kOperatorsPerSample; ++i) at::add(a, b);
  const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
  return took.count() / kOperatorsPerSample;
}

/// In a process of its own: plain operators, with the fallback registered or without. One line per sample.
void measure_plain(bool is_registered, int samples) {
  at::set_num_threads(1);
  if (is_registered) install_interceptor();
  const auto a = at::ones({4});
  for (int i = 0; i < samples; ++i) std::printf("%.9f\n", time_of(a, a));
}

Samples plain_in_own_process(const char* kind, const Plan& plan) {
  Samples samples;
  run_ranks(1, {"--plain", kind, "--samples", std::to_string(plan.samples)},
            [&](std::string_view line) { samples.push_back(std::stod(std::string(line))); });
  return samples;
}

void add_not_intercepted(Report& report, const Plan& plan) {
  Samples ours;
  Samples theirs;
  for (int round = 0; round < plan.rounds; ++round) {
    show_progress("plain operators, round " + std::to_string(round + 1));
    for (const auto sample : plain_in_own_process("registered", plan)) ours.push_back(sample);
    for (const auto sample : plain_in_own_process("unregistered", plan)) theirs.push_back(sample);
  }
  clear_progress();
  report.add({.case_name = "add 4 floats, not intercepted",
              .metric = "ms",
              .ours = figure_of(ours),
              .peer = "libtorch",
              .theirs = figure_of(theirs),
              .goal = 0.97});
}

void add_intercepted(Report& report, const Plan& plan) {
  at::set_num_threads(1);
  const auto plain = at::ones({4});
  const auto marked = at::ones({4});
  mark_intercepted(marked);
  const auto owned = at::ones({4});
  const OwnedStorage ownership(owned, std::make_shared<Idle>());
  OperatorCounter counter;
  const std::map<std::string, std::function<double()>> contenders = {
      {"libtorch", [&] { return time_of(plain, plain); }},
      {"by a mark nobody answers for", [&] { return time_of(marked, plain); }},
      {"by an owner", [&] { return time_of(owned, plain); }},
      {"by a scope",
       [&] {
         const EnterScope entered(std::make_shared<GoingOn>());
         return time_of(plain, plain);
       }},
      {"by the operator counter",
       [&] {
         const auto counting = counter.count();
         return time_of(plain, plain);
       }},
  };
  std::map<std::string, Samples> samples;
  for (int i = 0; i < plan.rounds * plan.samples; ++i) {
    for (const auto& [name, measure] : contenders) samples[name].push_back(measure());
  }
  const auto libtorch = figure_of(samples.at("libtorch"));
  for (const auto& [name, measured] : samples) {
    if (name == "libtorch") continue;
    const auto ours = figure_of(measured);
    report.add({.case_name = "add 4 floats, intercepted " + name,
                .metric = "ms",
                .ours = ours,
                .peer = "libtorch",
                .theirs = libtorch});
    Samples over;
    for (const auto sample : measured) over.push_back(1e3 * (sample - libtorch.value));
    report.add({.case_name = "cost per operator, intercepted " + name,
                .metric = "us",
                .ours = difference_figure_of(over),
                .peer = "bound",
                .theirs = {.value = 1, .spread = 0, .sample_count = 1},
                .goal = 1});
  }
}

void run(const Plan& plan, const std::string& output) {
  std::printf("intercept on %s; medians and interquartile ranges\n", describe_machine().c_str());
  Report report("intercept", output);
  add_not_intercepted(report, plan);
  add_intercepted(report, plan);
}

}  // namespace
}  // namespace lockstep::bench

int main(int argc, char** argv) {
  using namespace lockstep::bench;
  Plan plan;
  std::string output;
  std::string plain;
  bool is_quick = false;
  CLI::App app("What interception costs per operator, beside plain libtorch");
  app.add_option("--output", output, "write the rows to this file, as JSON");
  app.add_option("--rounds", plan.rounds, "how often the peers take turns")->check(CLI::Range(1, 100));
  app.add_option("--samples", plan.samples, "per round")->check(CLI::Range(1, 10000));
  app.add_flag("--quick", is_quick, "few samples, to see that it works");
  app.add_option("--plain", plain)->group("");
  CLI11_PARSE(app, argc, argv);
  if (is_quick) plan = {.rounds = 1, .samples = 3};
  return exit_code_of([&] { plain.empty() ? run(plan, output) : measure_plain(plain == "registered", plan.samples); });
}
