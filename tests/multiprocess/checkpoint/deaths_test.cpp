// A rank that is killed in the middle of a save: whenever that is, a whole checkpoint is found afterwards.
#include <csignal>
#include <filesystem>
#include <random>
#include <set>
#include <sstream>

#include "lockstep/base/env.h"
#include "lockstep/checkpoint/manager.h"
#include "lockstep/checkpoint/verify.h"
#include "lockstep/testing/temp_dir.h"
#include "tests/support/deaths.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;
using deaths::DiesAt;

constexpr int kRanks = 3;
constexpr int kEvents = 40;  // more than a save has

torch::nn::Linear model_of(double value) {
  torch::nn::Linear model(30, 40);
  const at::NoGradGuard no_grad;
  for (auto& parameter : model->parameters()) parameter.fill_(value);
  return model;
}

/// The number that all parameters have; NaN if they do not have the same.
double value_of(const torch::nn::Linear& model) {
  const auto first = model->bias[0].item<double>();
  for (const auto& parameter : model->parameters()) {
    if (!parameter.eq(first).all().item<bool>()) return NAN;
  }
  return first;
}

/// Who dies when. Ranks are other processes: they learn it by a variable.
struct Trial {
  int victim = 0;
  int event = 0;
  bool is_asynchronous = false;
  std::string folder = "";

  static constexpr const char* kVariable = "LOCKSTEP_TEST_TRIAL";
  static Trial given() {
    Trial trial;
    std::istringstream(env(kVariable).value_or("")) >> trial.victim >> trial.event >> trial.is_asynchronous >>
        trial.folder;
    return trial;
  }
  void give() const { ::setenv(kVariable, str(victim, " ", event, " ", is_asynchronous, " ", folder).c_str(), 1); }
  std::string to_string() const {
    return str("rank ", victim, " dies at event ", event, is_asynchronous ? ", asynchronous" : "");
  }
};

/// Saves step 1, and step 2 with a death at the n-th event of the victim.
void save_and_die(const World& world) {
  const auto trial = Trial::given();
  dcp::CheckpointManager manager(trial.folder, {.every = 1, .keep_last = 1, .asynchronous = trial.is_asynchronous});
  auto one = model_of(1);
  manager.save(1, dcp::State().add("model", one));
  manager.wait();
  barrier(world.group());
  DiesAt dies(trial.event);
  std::optional<ObserverScope> scope;
  if (world.rank() == trial.victim) scope.emplace(dies);
  auto two = model_of(2);
  try {
    manager.save(2, dcp::State().add("model", two));
    manager.wait();
  } catch (const c10::Error&) {
    // Whoever is left learns of it.
  }
}

// FSDP-100
TEST(CheckpointDeaths, LeaveAWholeCheckpointWheneverTheyCome) {
  const auto trials = std::stoi(env("LOCKSTEP_CHECKPOINT_TRIALS").value_or("6"));
  const testing::TempDir folder;
  std::mt19937 random(7);
  std::set<int64_t> found;
  for (int number = 0; number < trials; ++number) {
    const Trial trial{.victim = static_cast<int>(random() % kRanks),
                      .event = static_cast<int>(random() % kEvents),
                      .is_asynchronous = number % 2 == 1,
                      .folder = folder.file(std::to_string(number))};
    if (!testing::is_rank_process()) trial.give();
    deaths::run(kRanks, save_and_die, 10s, trial.to_string());
    if (testing::is_rank_process()) continue;  // it is the rank of a later trial
    dcp::CheckpointManager manager(trial.folder);
    auto loaded = model_of(0);
    const auto step = manager.resume(dcp::State().add("model", loaded));
    ASSERT_TRUE(step) << trial.to_string();
    EXPECT_EQ(value_of(loaded), static_cast<double>(*step)) << trial.to_string();
    found.insert(*step);
    for (const auto each : manager.steps()) EXPECT_TRUE(dcp::verify(manager.path_of(each)).empty());
    // Nothing is left of the attempt.
    for (const auto& entry : std::filesystem::directory_iterator(trial.folder)) {
      EXPECT_EQ(entry.path().filename().string().find(".saving-"), std::string::npos) << entry.path();
    }
  }
  if (trials > 20) {
    EXPECT_EQ(found.size(), 2) << "deaths do not come at all times";
  }
}

}  // namespace
}  // namespace lockstep
