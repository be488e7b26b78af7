// A benchmark of training steps: C++ contenders in this program's ranks, Python ones in ranks of its peer script, in
// turns, for some models and numbers of ranks. Who competes and what is made of the figures is the benchmark's.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "benchmarks/kit/report.h"
#include "benchmarks/kit/training_rank.h"

namespace lockstep::bench {

/// By what was measured, then by contender.
using Measured = std::map<std::string, std::map<std::string, Samples>>;

/// In one case: "mlp", 2.
using AddRows = std::function<void(Report& report, const std::string& model, int world, const Measured& measured)>;

struct TrainingBenchmark {
  std::string name;
  std::string description;
  std::vector<std::string> models = {"mlp", "300-layers", "gpt"};
  std::string quick_model = "300-layers";
  std::vector<int> worlds = {1, 2, 4};
  std::vector<std::string> contenders = {};
  std::vector<std::string> python_contenders = {};
  /// Those whose memory is measured, each in processes of its own: Python's if the name begins with "python-".
  std::vector<std::string> alone = {};
  std::string python_peer;  // the script
  MakeContender make;
  /// Times in milliseconds, one per round: the round's median. Memory in bytes, once.
  AddRows add_rows;
};

/// The program: its command line, and what is then asked for. Returns its exit status.
int training_main(int argc, char** argv, const TrainingBenchmark& benchmark);

/// Figures of contenders less those of another one of the same round and language: {{"ours", "local"}}.
std::map<std::string, Samples> differences(const std::map<std::string, Samples>& figures,
                                           const std::map<std::string, std::string>& less);

/// A row for each of `peers` that has figures, if `ours` has. `scale` multiplies all.
struct PeerRows {
  std::string case_name = {};
  std::string metric = {};
  std::string ours = {};
  std::vector<std::string> peers = {};
  std::map<std::string, double> goals = {};  // by peer
  double scale = 1;
  bool are_differences = false;  // of two measured values each
};
void add_peer_rows(Report& report, const PeerRows& rows, const std::map<std::string, Samples>& figures);

}  // namespace lockstep::bench
