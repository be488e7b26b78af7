// Training steps of fully_shard() over shared memory, beside Python's fully_shard over gloo, our own
// DistributedDataParallel, gathers that copy (share_on_host off) and the step without any of them. Round by round, each
// time fresh processes; within a round the C++ ones take turns step by step. See docs/benchmarks.md.
#include "benchmarks/fsdp/contender.h"
#include "benchmarks/kit/training.h"
#include "lockstep/base/str.h"

namespace lockstep::bench {
namespace {

/// That is, microseconds of a unit's host time.
constexpr double kHostBound = 20;

/// What a step is meant to be, beside others'.
std::map<std::string, double> step_goals(const std::string& model, int world) {
  std::map<std::string, double> goals;
  if (world == 2) goals["python-fully_shard"] = 3;
  if (world == 4) goals["python-fully_shard"] = 6;
  if (world > 1 && model == "gpt") goals["ddp"] = 1 / 1.3;
  if (world == 1 && gpu_count() > 0) goals["local"] = 1 / 1.25;
  return goals;
}

void add_rows(Report& report, const std::string& model, int world, const Measured& measured) {
  const auto where = str(model, " world ", world);
  const auto add = [&](PeerRows rows, const std::map<std::string, Samples>& figures) {
    rows.case_name = str(rows.case_name, " ", where);
    rows.ours = "ours";
    rows.peers = {"python-fully_shard", "copied", "ddp", "local", "bound"};
    add_peer_rows(report, rows, figures);
  };
  const auto& steps = measured.at("step");
  add({.case_name = "step", .metric = "ms", .goals = step_goals(model, world)}, steps);
  auto exposed = differences(
      steps, {{"ours", "local"}, {"copied", "local"}, {"ddp", "local"}, {"python-fully_shard", "python-local"}});
  add({.case_name = "exposed communication", .metric = "ms", .are_differences = true}, exposed);
  if (model == "300-layers" && world == 1) {
    constexpr double kScale = 1000.0 / 300;
    exposed["bound"] = Samples(exposed.at("ours").size(), kHostBound / kScale);
    add({.case_name = "host per unit",
         .metric = "us",
         .goals = {{"bound", 1}},
         .scale = kScale,
         .are_differences = true},
        exposed);
  }
  add({.case_name = "peak memory", .metric = "MiB", .goals = {{"python-fully_shard", 1}}, .scale = 1.0 / (1 << 20)},
      measured.at("peak"));
}

}  // namespace
}  // namespace lockstep::bench

int main(int argc, char** argv) {
  using namespace lockstep::bench;
  return training_main(argc, argv,
                       {.name = "fsdp",
                        .description = "training steps of fully_shard() beside Python's and beside our DDP",
                        .contenders = {"local", "ours", "copied", "ddp"},
                        .python_contenders = {"python-local", "python-fully_shard"},
                        .alone = {"ours", "copied", "ddp", "python-fully_shard"},
                        .python_peer = LOCKSTEP_BENCH_PYTHON_PEER,
                        .make = make_contender,
                        .add_rows = add_rows});
}
