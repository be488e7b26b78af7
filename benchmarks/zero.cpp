// Training with AdamW under DistributedDataParallel, its state divided by ZeroRedundancyOptimizer: times and memory
// beside Python's optimizer of that name and beside torch::optim::AdamW, not divided. Round by round, each time fresh
// processes; within a round the C++ ones take turns step by step. See docs/benchmarks.md.
#include "benchmarks/kit/training.h"
#include "benchmarks/zero/contender.h"
#include "lockstep/base/str.h"

namespace lockstep::bench {
namespace {

constexpr double kMiB = 1 << 20;

/// What `ours` counted, beside what else it counted or what it must not exceed.
std::map<std::string, Samples> counted_by_ours(const Measured& measured, const std::map<std::string, std::string>& as) {
  std::map<std::string, Samples> figures;
  for (const auto& [what, name] : as) {
    const auto found = measured.find(what);
    if (found != measured.end()) figures[name] = found->second.at("lockstep");
  }
  return figures;
}

void add_rows(Report& report, const std::string& model, int world, const Measured& measured) {
  const auto where = str(model, " world ", world);
  const std::vector<std::string> others = {"python-zero", "python-zero-views", "torch-adamw", "lockstep-parameters",
                                           "lockstep-gradients"};
  const auto add = [&](PeerRows rows, const std::map<std::string, Samples>& figures) {
    rows.case_name = str(rows.case_name, " ", where);
    rows.ours = "lockstep";
    if (rows.peers.empty()) rows.peers = others;
    if (rows.case_name == "optimizer step mlp world 2") rows.goals = {{"python-zero", 4}};
    if (rows.case_name == "optimizer step 300-layers world 2") rows.goals = {{"python-zero", 15}};
    add_peer_rows(report, rows, figures);
  };
  add({.case_name = "optimizer step", .metric = "ms"}, measured.at("optimizer-step"));
  add({.case_name = "step", .metric = "ms"}, measured.at("step"));
  if (world > 1) {
    const auto& figures = measured.at("steps-in-a-row");
    add_peer_rows(report,
                  {.case_name = str("step ", model, " overlapped world ", world),
                   .metric = "ms",
                   .ours = "overlapped",
                   .peers = {"blocking"},
                   .scale = 1.0 / kStepsInARow},
                  {{"overlapped", figures.at("lockstep-overlapped")}, {"blocking", figures.at("lockstep-parameters")}});
  }
  add({.case_name = "state bytes", .metric = "MiB", .peers = {"ideal"}, .goals = {{"ideal", 0.98}}, .scale = 1 / kMiB},
      counted_by_ours(measured, {{"state", "lockstep"}, {"even-share", "ideal"}}));
  add({.case_name = "state bytes", .metric = "MiB", .scale = 1 / kMiB}, measured.at("state"));
  add({.case_name = "peak memory", .metric = "MiB", .scale = 1 / kMiB}, measured.at("peak"));
  add({.case_name = "consolidation extra memory",
       .metric = "MiB",
       .peers = {"bound", "at-once"},
       .goals = {{"bound", 1}},
       .scale = 1 / kMiB},
      counted_by_ours(
          measured,
          {{"consolidation", "lockstep"}, {"consolidation-bound", "bound"}, {"consolidation-at-once", "at-once"}}));
}

}  // namespace
}  // namespace lockstep::bench

int main(int argc, char** argv) {
  using namespace lockstep::bench;
  return training_main(
      argc, argv,
      {.name = "zero",
       .description = "AdamW with its state divided among ranks, beside Python's and beside one that "
                      "is not divided",
       .contenders = {"lockstep", "lockstep-parameters", "lockstep-gradients", "lockstep-overlapped", "torch-adamw"},
       .python_contenders = {"python-zero", "python-zero-views"},
       .alone = {"lockstep", "lockstep-parameters", "lockstep-gradients", "torch-adamw", "python-zero",
                 "python-zero-views"},
       .python_peer = LOCKSTEP_BENCH_PYTHON_PEER,
       .make = make_contender,
       .add_rows = add_rows});
}
