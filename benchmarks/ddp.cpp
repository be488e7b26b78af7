// Training steps of DistributedDataParallel over shared memory, beside libtorch's c10d::Reducer over gloo in the same
// binary, and Python's DistributedDataParallel over gloo. Round by round, each time fresh processes; within a round the
// C++ ones take turns step by step. See docs/benchmarks.md.
#include "benchmarks/ddp/contender.h"
#include "benchmarks/kit/training.h"
#include "lockstep/base/str.h"

namespace lockstep::bench {
namespace {

void add_rows(Report& report, const std::string& model, int world, const Measured& measured) {
  const auto where = str(model, " world ", world);
  const auto add = [&](PeerRows rows, const std::map<std::string, Samples>& figures) {
    rows.case_name = str(rows.case_name, " ", where);
    rows.ours = "ours";
    rows.peers = {"python-ddp", "c10d-reducer", "local"};
    if (rows.case_name == "overhead mlp world 2") rows.goals = {{"python-ddp", 1 / 0.3}};
    if (rows.case_name == "host per parameter 300-layers world 1") rows.goals = {{"c10d-reducer", 2}};
    add_peer_rows(report, rows, figures);
  };
  const auto overhead =
      differences(measured.at("step"), {{"ours", "local"}, {"c10d-reducer", "local"}, {"python-ddp", "python-local"}});
  add({.case_name = "overhead", .metric = "ms", .are_differences = true}, overhead);
  add({.case_name = "step", .metric = "ms"}, measured.at("step"));
  // What one rank does in a world of several: without others it copies nothing.
  if (world == 1) {
    add_peer_rows(report,
                  {.case_name = str("step with copies ", where),
                   .metric = "ms",
                   .ours = "ours-copies",
                   .peers = {"ours", "python-ddp", "c10d-reducer", "local"}},
                  measured.at("step"));
  }
  if (model == "300-layers") {
    add({.case_name = "host per parameter", .metric = "us", .scale = 1000.0 / 600, .are_differences = true}, overhead);
  }
  add({.case_name = "peak memory", .metric = "MiB", .scale = 1.0 / (1 << 20)}, measured.at("peak"));
}

}  // namespace
}  // namespace lockstep::bench

int main(int argc, char** argv) {
  using namespace lockstep::bench;
  return training_main(argc, argv,
                       {.name = "ddp",
                        .description = "training steps of DistributedDataParallel beside c10d::Reducer and Python's",
                        .contenders = {"local", "ours", "ours-copies", "c10d-reducer"},
                        .python_contenders = {"python-local", "python-ddp"},
                        .alone = {"ours", "c10d-reducer"},
                        .python_peer = LOCKSTEP_BENCH_PYTHON_PEER,
                        .make = make_contender,
                        .add_rows = add_rows});
}
