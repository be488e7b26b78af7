// Training steps of compiled modules under DDP: cut where buckets end, beside the same as one part, DDP without
// compilation, and Python's torch.compile with its DDPOptimizer. See docs/benchmarks.md.
#include "benchmarks/graph/contender.h"
#include "benchmarks/kit/training.h"
#include "lockstep/base/str.h"

namespace lockstep::bench {
namespace {

constexpr auto kPython = "python-ddpoptimizer";

void add_rows(Report& report, const std::string& model, int world, const Measured& measured) {
  const auto where = world == 2 ? std::string() : str(" world ", world);
  add_peer_rows(report,
                {.case_name = str("step ", model, " split", where),
                 .metric = "ms",
                 .ours = "split",
                 .peers = {"eager", "unsplit", kPython},
                 .goals = {{"eager", 1 / 1.03}, {"unsplit", 1}}},
                measured.at("step"));
  add_peer_rows(report,
                {.case_name = str("step ", model, " measured cuts", where),
                 .metric = "ms",
                 .ours = "measured",
                 .peers = {"default", "eager"},
                 .goals = {{"default", 1}}},
                measured.at("step"));
  add_peer_rows(report,
                {.case_name = str("first bucket ", model, where),
                 .metric = "ms",
                 .ours = "split",
                 .peers = {"unsplit", "eager"},
                 .goals = {{"unsplit", 2.5}}},
                measured.at("first"));
  add_peer_rows(
      report,
      {.case_name = str("exposed share ", model, where), .metric = "%", .ours = "split", .peers = {"unsplit", "eager"}},
      measured.at("exposed"));
  auto captures = measured.at("capture");
  if (const auto found = captures.find(kPython); found != captures.end()) captures["python-dynamo"] = found->second;
  add_peer_rows(report,
                {.case_name = str("capture ", model, where),
                 .metric = "ms",
                 .ours = "split",
                 .peers = {"python-dynamo"},
                 .goals = {{"python-dynamo", 5}}},
                captures);
}

}  // namespace
}  // namespace lockstep::bench

int main(int argc, char** argv) {
  using namespace lockstep::bench;
  return training_main(argc, argv,
                       {.name = "graph",
                        .description = "training steps of compiled modules under DDP, cut where buckets end or not",
                        .models = {"mlp", "gpt"},
                        .quick_model = "gpt",
                        .worlds = {2},
                        .contenders = {"eager", "unsplit", "split", "default", "measured"},
                        .python_contenders = {kPython},
                        .python_peer = LOCKSTEP_BENCH_PYTHON_PEER,
                        .make = make_contender,
                        .add_rows = add_rows});
}
