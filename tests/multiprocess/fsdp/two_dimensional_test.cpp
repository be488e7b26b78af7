// FSDP over tensor parallelism among processes: over gloo, and over shared memory, where ranks read each other's parts.
#include <torch/optim/adam.h>

#include "lockstep/fsdp/sharded_files.h"
#include "lockstep/testing/temp_dir.h"
#include "tests/support/tensor_parallel_models.h"

namespace lockstep::fsdp_two_dimensional_processes_test {

using namespace tensor_parallel_models;
using torch::optim::Adam;
using torch::optim::SGD;

class FsdpTwoDimensionalProcesses : public ::testing::TestWithParam<std::string> {};

INSTANTIATE_TEST_SUITE_P(Backends, FsdpTwoDimensionalProcesses, ::testing::Values("gloo", "shm"),
                         [](const auto& info) { return info.param; });

// TP-49, TP-50, TP-54
TEST_P(FsdpTwoDimensionalProcesses, TrainAsOneProcess) {
  const auto body = [](const World&) {
    const auto mesh = mesh_of(2, 2);
    expect_trains_as_one<SGD>(mesh, parallel_net(mesh["tp"]), {.mesh = mesh["dp"]}, "SGD");
    expect_trains_as_one<Adam>(mesh, parallel_net(mesh["tp"]), {.mesh = mesh["dp"], .share_on_host = false}, "Adam",
                               1e-4);
    const MixedPrecisionPolicy policy{.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
    expect_trains_as_one<SGD>(mesh, parallel_net(mesh["tp"]), {.mesh = mesh["dp"], .mp_policy = policy}, "bfloat16",
                              0.05);
  };
  const auto report = testing::run_processes_from_gtest({.world_size = 4, .backend = GetParam()}, body, "trains");
  EXPECT_TRUE(report.has_passed()) << report.describe();
}

// TP-56: save (2,2), load in one process
TEST_P(FsdpTwoDimensionalProcesses, SaveOnAMeshAndResumeAlone) {
  std::optional<testing::TempDir> dir;
  if (!testing::is_rank_process()) {
    dir.emplace();
    ::setenv("LOCKSTEP_TEST_NOTE", dir->file("run").c_str(), 1);
  }
  const std::string path = std::getenv("LOCKSTEP_TEST_NOTE");
  const auto save = [&](const World&) {
    const auto mesh = mesh_of(2, 2);
    auto net = parallel_net(mesh["tp"]);
    shard_net(net, {.mesh = mesh["dp"]});
    auto optimizer = optimizer_of<Adam>(net);
    train_parts(net, optimizer, mesh.get_group("dp"), 0, 2);
    save_sharded(*net, optimizer, path);
  };
  const auto resume = [&](const World&) {
    auto expected = whole_net();
    auto wanted = optimizer_of<Adam>(expected);
    train_whole(expected, wanted, 0, 4);
    auto net = whole_net(6);
    auto optimizer = optimizer_of<Adam>(net);
    load_sharded(*net, optimizer, path);
    train_whole(net, optimizer, 2, 4);
    expect_same_net(net, expected, 1e-4, "resumed");
  };
  const auto saved = testing::run_processes_from_gtest({.world_size = 4, .backend = GetParam()}, save, "saves");
  EXPECT_TRUE(saved.has_passed()) << saved.describe();
  const auto resumed = testing::run_processes_from_gtest({.world_size = 1, .backend = GetParam()}, resume, "resumes");
  EXPECT_TRUE(resumed.has_passed()) << resumed.describe();
}

}  // namespace lockstep::fsdp_two_dimensional_processes_test
