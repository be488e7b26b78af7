#include "benchmarks/kit/training.h"

#include <c10/util/Exception.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <sstream>

#include "benchmarks/kit/exit_code.h"
#include "benchmarks/kit/peer.h"
#include "benchmarks/kit/processes.h"
#include "benchmarks/kit/progress.h"
#include "lockstep/base/str.h"

namespace lockstep::bench {
namespace {

struct Plan {
  std::vector<std::string> models = {};
  std::vector<int> worlds = {};
  int rounds = 5;
  double seconds = 1.5;
  int64_t width = 32;
  bool has_python = true;
};

/// Runs one case of a benchmark.
class Runner {
 public:
  Runner(const TrainingBenchmark& benchmark, const Plan& plan, std::string model, int world)
      : benchmark_(benchmark), plan_(plan), model_(std::move(model)), world_(world) {}

  Measured measure() {
    Measured measured;
    for (int round = 0; round < plan_.rounds; ++round) {
      show_progress(str(model_, ", world ", world_, ", round ", round + 1, " of ", plan_.rounds));
      auto times = in_cpp(benchmark_.contenders, plan_.seconds);
      times.merge(in_python(benchmark_.python_contenders, plan_.seconds));
      for (const auto& [key, samples] : times) {
        measured[key.first][key.second].push_back(figure_of(samples).value);
      }
    }
    if (has_given_up_) {
      // Rows of fewer rounds than the others' would compare times of different minutes.
      for (auto& [what, contenders] : measured) {
        for (const auto& name : benchmark_.python_contenders) contenders.erase(name);
      }
    }
    for (const auto& name : benchmark_.alone) {
      show_progress(str(model_, ", world ", world_, ", memory of ", name));
      for (const auto& [key, samples] : alone(name)) {
        // Times of a run that is alone do not compare.
        if (!measured[key.first].contains(name)) measured[key.first][name] = samples;
      }
    }
    clear_progress();
    return measured;
  }

 private:
  using Lines = std::map<std::pair<std::string, std::string>, Samples>;  // by what and contender

  Lines alone(const std::string& name) {
    return name.starts_with("python-") ? in_python({name}, 0) : in_cpp({name}, 0);
  }

  Lines in_cpp(const std::vector<std::string>& contenders, double seconds) const {
    auto arguments = arguments_for(contenders, seconds);
    arguments.insert(arguments.begin(), "--as-rank");
    Lines lines;
    run_ranks(world_, arguments, [&](std::string_view line) { take(lines, line); });
    return lines;
  }

  /// Nothing without Python, and once it has failed in this case.
  Lines in_python(const std::vector<std::string>& contenders, double seconds) {
    if (!plan_.has_python || has_given_up_) return {};
    const auto figures =
        figures_of_peer(str("Python in case ", model_, " world ", world_),
                        python_ranks(world_, benchmark_.python_peer, arguments_for(contenders, seconds)));
    has_given_up_ = !figures;
    Lines lines;
    for (const auto& line : figures.value_or(std::vector<std::string>())) take(lines, line);
    return lines;
  }

  std::vector<std::string> arguments_for(const std::vector<std::string>& contenders, double seconds) const {
    return {"--model",      model_,
            "--width",      std::to_string(plan_.width),
            "--contenders", join(contenders, ","),
            "--seconds",    std::to_string(seconds)};
  }

  static void take(Lines& lines, std::string_view line) {
    std::istringstream words{std::string(line)};
    std::pair<std::string, std::string> key;
    double value = 0;
    if (words >> key.first >> key.second >> value) lines[key].push_back(value);
  }

  const TrainingBenchmark& benchmark_;
  const Plan& plan_;
  const std::string model_;
  const int world_;
  bool has_given_up_ = false;
};

void run(const TrainingBenchmark& benchmark, Plan plan, const std::string& output) {
  std::printf("%s on %s; medians and interquartile ranges of %d rounds\n", benchmark.name.c_str(),
              describe_machine().c_str(), plan.rounds);
  if (plan.has_python && !has_python()) {
    std::printf("no rows for Python: no Python with torch was found\n");
    plan.has_python = false;
  }
  Report report(benchmark.name, output);
  for (const auto& model : plan.models) {
    for (const int world : plan.worlds) {
      benchmark.add_rows(report, model, world, Runner(benchmark, plan, model, world).measure());
    }
  }
}

}  // namespace

int training_main(int argc, char** argv, const TrainingBenchmark& benchmark) {
  Plan plan{.models = benchmark.models, .worlds = benchmark.worlds};
  RankPlan rank;
  std::string output;
  bool without_python = false;
  bool is_quick = false;
  bool is_rank = false;
  CLI::App app(benchmark.description);
  app.add_option("--output", output, "write the rows to this file, as JSON");
  auto* models = app.add_option("--models", plan.models, "of " + join(benchmark.models, ", "))
                     ->delimiter(',')
                     ->check(CLI::IsMember(benchmark.models));
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
    if (models->empty()) plan.models = {benchmark.quick_model};
    if (worlds->empty()) plan.worlds = {2};
    if (rounds->empty()) plan.rounds = 1;
    plan.seconds = 0;
  }
  plan.has_python = !without_python;
  rank.which.width = plan.width;
  rank.seconds = plan.seconds;
  return exit_code_of([&] { is_rank ? run_rank(rank, benchmark.make) : run(benchmark, plan, output); });
}

std::map<std::string, Samples> differences(const std::map<std::string, Samples>& figures,
                                           const std::map<std::string, std::string>& less) {
  std::map<std::string, Samples> differences;
  for (const auto& [name, base] : less) {
    if (!figures.contains(name) || !figures.contains(base)) continue;
    const auto& values = figures.at(name);
    for (std::size_t round = 0; round < values.size(); ++round) {
      differences[name].push_back(values[round] - figures.at(base)[round]);
    }
  }
  return differences;
}

void add_peer_rows(Report& report, const PeerRows& rows, const std::map<std::string, Samples>& figures) {
  const auto scaled = [&](Samples samples) {
    for (auto& sample : samples) sample *= rows.scale;
    return rows.are_differences ? difference_figure_of(std::move(samples)) : figure_of(std::move(samples));
  };
  const auto ours = figures.find(rows.ours);
  if (ours == figures.end()) return;
  for (const auto& peer : rows.peers) {
    const auto theirs = figures.find(peer);
    if (theirs == figures.end()) continue;
    const auto goal = rows.goals.find(peer);
    report.add({.case_name = rows.case_name,
                .metric = rows.metric,
                .ours = scaled(ours->second),
                .peer = peer,
                .theirs = scaled(theirs->second),
                .goal = goal == rows.goals.end() ? std::nullopt : std::optional(goal->second)});
  }
}

}  // namespace lockstep::bench
