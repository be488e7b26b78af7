// Checkpoints of a model that FSDP divides among two ranks, weights and AdamW's state: saving, loading, loading what
// four ranks saved, and how long an asynchronous save holds training up; beside Python's torch.distributed.checkpoint
// and a plain write of the same bytes. See docs/benchmarks.md.
#include <fcntl.h>
#include <unistd.h>

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

#include "benchmarks/kit/exit_code.h"
#include "benchmarks/kit/peer.h"
#include "benchmarks/kit/processes.h"
#include "benchmarks/kit/progress.h"
#include "benchmarks/kit/report.h"
#include "benchmarks/kit/training.h"
#include "lockstep/base/str.h"
#include "lockstep/base/unique_fd.h"
#include "lockstep/checkpoint/load.h"
#include "lockstep/checkpoint/save.h"
#include "lockstep/lockstep.h"

namespace lockstep::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kRanks = 2;
constexpr int kOtherRanks = 4;
constexpr int64_t kWidth = 1024;
constexpr double kBytesPerMb = 1e6;
/// A float for the weight and two for its state.
constexpr double kMbPerLayer = 3 * 4 * kWidth * kWidth / kBytesPerMb;

struct Settings {
  std::string what;
  int64_t layers = 0;
  int samples = 3;
  std::string path;
};

struct Run {
  Run(const World& world, int64_t layers) {
    const auto mesh = DeviceMesh::from_group(world.group(), "cpu");
    for (int64_t i = 0; i < layers; ++i) {
      model->push_back(torch::nn::Linear(torch::nn::LinearOptions(kWidth, kWidth).bias(false)));
    }
    for (auto& layer : *model) fully_shard(*layer.ptr(), {.mesh = mesh});
    fully_shard(*model, {.mesh = mesh});
    optimizer.emplace(model->parameters(), optim::AdamWOptions{.lr = 1e-3});
    for (auto& parameter : model->parameters()) parameter.mutable_grad() = at::zeros_like(parameter.detach());
    optimizer->step();
    optimizer->zero_grad();
    state.add("model", model).add("optimizer", *optimizer, model);
  }
  torch::nn::Sequential model;
  std::optional<optim::AdamW> optimizer;
  dcp::State state;
};

void say(const World& world, const std::string& what, double value) {
  if (world.rank() != 0) return;
  std::printf("%s %f\n", what.c_str(), value);
  std::fflush(stdout);
}

/// From when all ranks begin until all have ended.
template <class Action>
void timed(const World& world, const std::string& what, const Action& action) {
  barrier(world.group());
  const auto start = Clock::now();
  action();
  barrier(world.group());
  const std::chrono::duration<double, std::milli> took = Clock::now() - start;
  say(world, what, took.count());
}

/// What a rank of a save writes, without anything around it.
void write_plainly(const std::string& path, const std::vector<char>& bytes) {
  const UniqueFd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0666));
  for (std::size_t done = 0; done < bytes.size();) {
    const auto written = ::write(file.get(), bytes.data() + done, bytes.size() - done);
    TORCH_CHECK(written > 0, "cannot write ", path);
    done += static_cast<std::size_t>(written);
  }
  ::fsync(file.get());
}

double resident_mb(const std::string& field) {
  std::string line;
  for (std::ifstream lines("/proc/self/status"); std::getline(lines, line);) {
    if (line.starts_with(field + ":")) return std::stod(line.substr(field.size() + 1)) / 1e3;
  }
  return 0;
}

void measure_saves(const World& world, const Settings& settings) {
  Run run(world, settings.layers);
  dcp::AsyncSaver saver;
  for (int i = 0; i < settings.samples; ++i) {
    const auto path = str(settings.path, "-", i);
    timed(world, "save", [&] { dcp::save(path, run.state); });
    timed(world, "load", [&] { dcp::load(path, run.state); });
    timed(world, "stall", [&] { saver.save(path + "-async", run.state); });
    saver.wait();
    barrier(world.group());
    if (world.rank() == 0) {
      std::filesystem::remove_all(path);
      std::filesystem::remove_all(path + "-async");
    }
    barrier(world.group());
    const auto mine = str(settings.path, "-plain-", world.rank());
    const std::vector<char> bytes(static_cast<std::size_t>(kMbPerLayer * static_cast<double>(settings.layers) *
                                                           kBytesPerMb / world.world_size()));
    timed(world, "write", [&] { write_plainly(mine, bytes); });
    std::filesystem::remove(mine);
  }
  std::ofstream("/proc/self/clear_refs") << "5";  // the peak begins anew
  const auto before = resident_mb("VmRSS");
  dcp::save(settings.path, run.state);
  say(world, "memory", resident_mb("VmHWM") - before);
  barrier(world.group());
  if (world.rank() == 0) std::filesystem::remove_all(settings.path);
}

void run_rank(const Settings& settings) {
  const auto world = init({.timeout = std::chrono::seconds(120)});
  if (settings.what == "all") return measure_saves(world, settings);
  Run run(world, settings.layers);
  if (settings.what == "prepare") return dcp::save(settings.path, run.state);
  for (int i = 0; i < settings.samples; ++i) {
    timed(world, "reshard", [&] { dcp::load(settings.path, run.state); });
  }
}

/// Also what a peer that failed has left there.
struct OwnFolder {
  explicit OwnFolder(const std::string& above) : path(str(above, "/lockstep-bench-", ::getpid())) {
    std::filesystem::create_directory(path);
  }
  ~OwnFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }
  OwnFolder(const OwnFolder&) = delete;
  OwnFolder& operator=(const OwnFolder&) = delete;
  const std::string path;
};

using Figures = std::map<std::string, Samples>;

void take(Figures& figures, std::string_view line) {
  std::istringstream words{std::string(line)};
  std::string what;
  double value = 0;
  if (words >> what >> value) figures[what].push_back(value);
}

Figures ours(Settings settings) {
  Figures figures;
  const auto run = [&](int ranks, const std::string& what) {
    run_ranks(ranks,
              {"--as-rank", what, "--layers", std::to_string(settings.layers), "--samples",
               std::to_string(settings.samples), "--folder", settings.path},
              [&](std::string_view line) { take(figures, line); });
  };
  run(kRanks, "all");
  run(kOtherRanks, "prepare");
  run(kRanks, "reshard");
  std::filesystem::remove_all(settings.path);
  return figures;
}

/// Empty if it could not be measured.
Figures pythons(const Settings& settings) {
  Figures figures;
  if (!has_python()) return figures;
  const auto run = [&](int ranks, const std::string& what) {
    const auto lines = figures_of_peer(
        "torch.distributed.checkpoint",
        python_ranks(ranks, LOCKSTEP_BENCH_PYTHON_PEER,
                     {"--what", what, "--layers", std::to_string(settings.layers), "--width", std::to_string(kWidth),
                      "--samples", std::to_string(settings.samples), "--path", settings.path}));
    if (!lines) return false;
    for (const auto& line : *lines) take(figures, line);
    return true;
  };
  if (run(kRanks, "all") && run(kOtherRanks, "prepare")) run(kRanks, "reshard");
  std::filesystem::remove_all(settings.path);
  return figures;
}

void measure(Report& report, const std::string& size, Settings settings, int rounds) {
  Figures mine;
  Figures theirs;
  const auto folder = settings.path;
  for (int round = 0; round < rounds; ++round) {
    show_progress(str(size, ", round ", round + 1, " of ", rounds));
    const OwnFolder own(folder);
    settings.path = own.path + "/ours";
    for (const auto& [what, samples] : ours(settings)) mine[what].push_back(figure_of(samples).value);
    settings.path = own.path + "/pythons";
    for (const auto& [what, samples] : pythons(settings)) theirs[what].push_back(figure_of(samples).value);
  }
  clear_progress();
  const auto add = [&](const std::string& case_name, const std::string& metric, const std::string& what,
                       const std::string& peer, const Samples& samples, std::optional<double> goal) {
    if (!mine.contains(what) || samples.empty()) return;
    report.add({.case_name = str(case_name, " ", size),
                .metric = metric,
                .ours = figure_of(mine.at(what)),
                .peer = peer,
                .theirs = figure_of(samples),
                .goal = goal});
  };
  constexpr const char* kPython = "torch.distributed.checkpoint";
  add("save", "ms", "save", kPython, theirs["save"], 2);
  add("save", "ms", "save", "torch.save", theirs["torch.save"], std::nullopt);
  add("save", "ms", "save", "write", mine["write"], 0.8);
  add("load", "ms", "load", kPython, theirs["load"], 2);
  add("reshard", "ms", "reshard", kPython, theirs["reshard"], 3);
  add("async stall", "ms", "stall", kPython, theirs["stall"], 3);
  // Next to nothing on both sides, so no ratio.
  if (!mine["memory"].empty() && !theirs["memory"].empty()) {
    std::printf("extra memory of a save, %s: %.1f MB, %s %.1f MB\n", size.c_str(), figure_of(mine["memory"]).value,
                kPython, figure_of(theirs["memory"]).value);
  }
}

}  // namespace
}  // namespace lockstep::bench

int main(int argc, char** argv) {
  using namespace lockstep::bench;
  Settings settings{.what = "", .path = "/dev/shm"};
  int rounds = 3;
  bool is_quick = false;
  bool has_large = false;
  std::string disk;
  std::string output;
  CLI::App app("checkpoints beside torch.distributed.checkpoint");
  app.add_option("--output", output, "write the rows to this file, as JSON");
  app.add_option("--rounds", rounds, "how often all take turns")->check(CLI::Range(1, 100));
  app.add_option("--samples", settings.samples, "per round")->check(CLI::Range(1, 100));
  app.add_option("--folder", settings.path, "where to save: memory, so that the disk is not measured");
  app.add_flag("--large", has_large, "4 GB too");
  app.add_option("--disk", disk, "measure in this folder too");
  app.add_flag("--quick", is_quick, "a small model and one round, to see that it works");
  app.add_option("--as-rank", settings.what)->group("");
  app.add_option("--layers", settings.layers)->group("");
  CLI11_PARSE(app, argc, argv);
  return exit_code_of([&] {
    if (!settings.what.empty()) return run_rank(settings);
    std::printf("checkpoint on %s; medians and interquartile ranges of %d rounds\n", describe_machine().c_str(),
                is_quick ? 1 : rounds);
    Report report("checkpoint", output);
    if (is_quick) settings.samples = 1;
    const auto with_mb = [&](double megabytes) {
      auto sized = settings;
      sized.layers = static_cast<int64_t>(megabytes / kMbPerLayer + 0.5);
      return sized;
    };
    if (is_quick) return measure(report, "25MB", with_mb(25), 1);
    measure(report, "500MB", with_mb(500), rounds);
    if (has_large) measure(report, "4GB", with_mb(4000), rounds);
    if (disk.empty()) return;
    auto on_disk = with_mb(500);
    on_disk.path = disk;
    measure(report, "500MB on disk", on_disk, rounds);
  });
}
