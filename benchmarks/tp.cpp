// Tensor parallelism, DTensors and checkpoints beside Python's: steps of a transformer block, what DTensor operations
// and checkpointed regions cost the host, and what memory regions save. Round by round, each time fresh processes;
// within a round the C++ contenders take turns step by step. See docs/benchmarks.md.
#include "benchmarks/kit/training.h"
#include "benchmarks/tp/contender.h"

namespace lockstep::bench {
namespace {

/// Those of `figures` that are there, by other names: {{"python", "python-tp"}}.
std::map<std::string, Samples> renamed(const std::map<std::string, Samples>& figures,
                                       const std::map<std::string, std::string>& names) {
  std::map<std::string, Samples> result;
  for (const auto& [name, other] : names) {
    if (figures.contains(name)) result[other] = figures.at(name);
  }
  return result;
}

void add_block_rows(Report& report, const Measured& measured) {
  const std::map<std::string, std::string> names = {{"ours", "ours"}, {"python", "python-tp"}, {"local", "one device"}};
  add_peer_rows(report,
                {.case_name = "block world 2",
                 .metric = "ms",
                 .ours = "ours",
                 .peers = {"python-tp", "one device"},
                 .goals = {{"python-tp", 2}}},
                renamed(measured.at("block"), names));
  add_peer_rows(report,
                {.case_name = "block sequence-parallel world 2",
                 .metric = "ms",
                 .ours = "ours",
                 .peers = {"python-tp"},
                 .goals = {{"python-tp", 2}}},
                renamed(measured.at("block-sequence-parallel"), names));
}

/// Of a call, whose host cost is what it takes above the same call on local tensors. A redistribution has no such call.
void add_dispatch_rows(Report& report, const Measured& measured) {
  const std::map<std::string, std::string> names = {{"ours", "ours"}, {"python", "python-dtensor"}};
  const auto add = [&](const std::string& name, const std::map<std::string, Samples>& figures, double goal,
                       bool are_differences) {
    PeerRows rows{.case_name = name,
                  .metric = "us",
                  .ours = "ours",
                  .peers = {"python-dtensor"},
                  .scale = 1000.0 / kCalls,
                  .are_differences = are_differences};
    if (goal > 0) rows.goals = {{"python-dtensor", goal}};
    add_peer_rows(report, rows, renamed(figures, names));
  };
  const auto& sums = measured.at("add");
  add("dispatch redistribute", measured.at("redistribute"), 15, false);
  add("dispatch redistribute to the same", measured.at("redistribute-same"), 0, false);
  add("dispatch add", differences(sums, {{"ours", "local"}, {"python", "python-local"}}), 15, true);
  add("dispatch add with the sum itself", sums, 0, false);
}

void add_rows(Report& report, const std::string&, int, const Measured& measured) {
  add_block_rows(report, measured);
  add_dispatch_rows(report, measured);
  const auto over_local = differences(measured.at("regions"), {{"ours", "local"}, {"python", "python-local"}});
  add_peer_rows(report,
                {.case_name = "checkpoint region",
                 .metric = "us",
                 .ours = "ours",
                 .peers = {"python-checkpoint"},
                 .goals = {{"python-checkpoint", 5}},
                 .scale = 1000.0 / kRegions,
                 .are_differences = true},
                renamed(over_local, {{"ours", "ours"}, {"python", "python-checkpoint"}}));
  add_peer_rows(report,
                {.case_name = "checkpoint peak memory",
                 .metric = "MiB",
                 .ours = "deep",
                 .peers = {"python-checkpoint", "not checkpointed"},
                 .goals = {{"python-checkpoint", 0.99}},  // no more, but for noise
                 .scale = 1.0 / (1 << 20)},
                renamed(measured.at("deep-peak"),
                        {{"deep", "deep"}, {"python-deep", "python-checkpoint"}, {"deep-local", "not checkpointed"}}));
}

}  // namespace
}  // namespace lockstep::bench

int main(int argc, char** argv) {
  using namespace lockstep::bench;
  return training_main(argc, argv,
                       {.name = "tp",
                        .description = "tensor parallelism, DTensors and checkpoints beside Python's",
                        .models = {"block"},
                        .quick_model = "block",
                        .worlds = {2},
                        .contenders = {"local", "ours"},
                        .python_contenders = {"python-local", "python"},
                        .alone = {"deep", "deep-local", "python-deep"},
                        .python_peer = LOCKSTEP_BENCH_PYTHON_PEER,
                        .make = make_contender,
                        .add_rows = add_rows});
}
