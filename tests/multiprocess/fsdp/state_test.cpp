// Units among processes, over shared memory and over gloo: a run that is saved on some ranks and resumed on others, and
// what ranks see when one of them dies while they gather.
#include <stdlib.h>
#include <torch/optim/adamw.h>

#include "lockstep/fsdp/sharded_files.h"
#include "lockstep/testing/temp_dir.h"
#include "tests/support/fsdp_state_models.h"

namespace lockstep::fsdp_processes_test {

using namespace fsdp_state_models;
using namespace std::chrono_literals;
using torch::optim::AdamW;

/// Ranks end with this once they saw what they should see: a gloo group that failed is not destroyed in time.
constexpr int kSawIt = 42;

class FsdpProcesses : public ::testing::TestWithParam<std::string> {};

INSTANTIATE_TEST_SUITE_P(Backends, FsdpProcesses, ::testing::Values("gloo", "shm"),
                         [](const auto& info) { return info.param; });

// FSDP-74, FSDP-76, FSDP-78
TEST_P(FsdpProcesses, SaveOnFourAndResumeOnTwo) {
  std::optional<testing::TempDir> dir;
  if (!testing::is_rank_process()) {
    dir.emplace();
    ::setenv("LOCKSTEP_TEST_NOTE", dir->file("run").c_str(), 1);
  }
  const std::string path = std::getenv("LOCKSTEP_TEST_NOTE");
  const auto save = [&](const World& world) {
    auto model = net();
    sharded(model, {.mesh = mesh_of(world)});
    AdamW optimizer(unique_parameters(*model), 0.01);
    train(model, optimizer, 0, 3);
    save_sharded(*model, optimizer, path);
    auto again = net(6);
    sharded(again, {.mesh = mesh_of(world)});
    AdamW resumed(unique_parameters(*again), 0.5);
    load_sharded(*again, resumed, path);
    train(model, optimizer, 3, 5);
    train(again, resumed, 3, 5);
    const auto expected = model->named_parameters();
    for (const auto& item : again->named_parameters()) {
      EXPECT_TRUE(item.value().equal(expected[item.key()])) << item.key();
    }
  };
  const auto resume = [&](const World& world) {
    auto expected = net();
    AdamW plain(unique_parameters(*expected), 0.01);
    train(expected, plain, 0, 5);
    auto model = net(6);
    sharded(model, {.mesh = mesh_of(world)});
    AdamW optimizer(unique_parameters(*model), 0.5);
    load_sharded(*model, optimizer, path);
    train(model, optimizer, 3, 5);
    const auto named = expected->named_parameters();
    for (const auto& [name, value] : full_state_dict(*model)) {
      const auto* found = named.find(name);
      if (found == nullptr) continue;
      EXPECT_TRUE(at::allclose(value, *found, 1e-4, 1e-5)) << name;
    }
  };
  const auto saved = testing::run_processes_from_gtest({.world_size = 4, .backend = GetParam()}, save, "saves");
  EXPECT_TRUE(saved.has_passed()) << saved.describe();
  const auto resumed = testing::run_processes_from_gtest({.world_size = 2, .backend = GetParam()}, resume, "resumes");
  EXPECT_TRUE(resumed.has_passed()) << resumed.describe();
}

/// Rank 1 dies while the others are in `work`, which must throw within a second or so, naming it.
void expect_verdict(const World& world, const std::function<void(Net& model, AdamW& optimizer)>& work) {
  auto model = net();
  sharded(model, {.mesh = mesh_of(world)});
  AdamW optimizer(unique_parameters(*model), 0.01);
  train(model, optimizer, 0, 2);
  barrier(world.group());
  if (world.rank() == 1) std::_Exit(kSawIt);
  const auto start = std::chrono::steady_clock::now();
  testing::expect_error([&] { work(model, optimizer); }, {"rank 1"});
  EXPECT_LT(std::chrono::steady_clock::now() - start, 3s);
  if (!::testing::Test::HasFailure()) std::_Exit(kSawIt);
}

// FSDP-75, FSDP-78, FSDP-79
TEST_P(FsdpProcesses, AreToldWhenOneDiesInAGather) {
  const std::vector<std::pair<std::string, std::function<void(Net&, AdamW&)>>> works = {
      {"forward", [](Net& model, AdamW&) { model->forward(batch(0)); }},
      {"state", [](Net& model, AdamW&) { full_state_dict(*model); }},
      {"optimizer", [](Net& model, AdamW& optimizer) { full_optimizer_state_dict(*model, optimizer); }},
      {"summon", [](Net& model, AdamW&) { static_cast<void>(unit_of(*model)->summon_full_params()); }},
      {"files", [](Net& model, AdamW& optimizer) { save_sharded(*model, optimizer, "/nowhere/run"); }},
  };
  for (const auto& [name, work] : works) {
    const auto report = testing::run_processes_from_gtest(
        {.world_size = 3, .backend = GetParam(), .timeout = 60s, .expected_exit_code = kSawIt},
        [&work = work](const World& world) { expect_verdict(world, work); }, name);
    EXPECT_TRUE(report.has_passed()) << name << report.describe();
  }
}

}  // namespace lockstep::fsdp_processes_test
