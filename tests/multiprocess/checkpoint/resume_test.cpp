// A run that goes on from a checkpoint: the same bits as if it had not been interrupted, with dropout, a schedule and a
// scaler; and nearly the same on another number of ranks.
#include <filesystem>

#include "lockstep/checkpoint/manager.h"
#include "lockstep/ddp/distributed_data_parallel.h"
#include "lockstep/fsdp/fully_shard.h"
#include "lockstep/lockstep.h"
#include "lockstep/testing/gtest.h"
#include "lockstep/testing/temp_dir.h"

namespace lockstep {
namespace {

constexpr int64_t kSteps = 9;
constexpr int64_t kRows = 12;

struct NetImpl : torch::nn::Module {
  NetImpl() {
    register_module("up", up);
    register_module("down", down);
  }
  at::Tensor forward(const at::Tensor& input) {
    return down(torch::dropout(at::tanh(up(input)), dropout, is_training()));
  }
  double dropout = 0.3;
  torch::nn::Linear up{6, 8};
  torch::nn::Linear down{8, 5};
};
TORCH_MODULE(Net);

/// Everything a program has.
class Training {
 public:
  Training(const std::string& layout, const World& world, uint64_t seed, double dropout) : rows_(world.group()) {
    torch::manual_seed(seed);
    net_ = Net();
    net_->dropout = dropout;
    const optim::AdamWOptions options{.lr = 0.05};
    if (layout == "fsdp") shard(DeviceMesh::from_group(world.group(), "cpu"));
    if (layout == "2-D") {
      const auto mesh = init_device_mesh("cpu", {world.world_size() / 2, 2}, {.mesh_dim_names = {"dp", "tp"}});
      parallelize_module(*net_, mesh["tp"], {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}});
      shard(mesh["dp"]);
      rows_ = mesh["dp"].get_group();
    }
    if (layout == "ddp" || layout.starts_with("zero")) ddp_.emplace(net_, world.group());
    if (layout == "ddp" || layout == "fsdp" || layout == "2-D") {
      optimizer_ = std::make_unique<optim::AdamW>(net_->parameters(), options);
    } else {
      ZeroOptions zero{.process_group = world.group()};
      if (layout == "zero 2") zero.stage = ZeroStage::kGradients;
      if (layout == "zero 2") zero.ddp = *ddp_;
      optimizer_ = std::make_unique<ZeroRedundancyOptimizer<optim::AdamW>>(net_->parameters(), options, zero);
    }
    schedule_ = std::make_unique<optim::CosineAnnealingLR>(*optimizer_, optim::CosineAnnealingLROptions{.T_max = 20});
    torch::manual_seed(100 * seed + (layout == "2-D" ? 0 : world.rank()));
  }

  dcp::State state() {
    dcp::State state;
    state.add("model", net_).add("optimizer", *optimizer_, net_).add("schedule", *schedule_);
    state.add("scaler", scaler_).add("random", dcp::random_state());
    return state;
  }

  /// The mean over all ranks, as bits.
  double step(int64_t number) {
    const auto all = at::randn({kRows, 6}, at::detail::createCPUGenerator(static_cast<uint64_t>(number)),
                               at::TensorOptions(at::kFloat));
    const auto batch = all.tensor_split(rows_->getSize())[static_cast<std::size_t>(rows_->getRank())];
    optimizer_->zero_grad();
    const auto loss = (ddp_ ? (*ddp_)(batch) : net_->forward(batch)).pow(2).mean();
    scaler_.scale(loss).backward();
    scaler_.step(*optimizer_);
    scaler_.update();
    schedule_->step();
    auto mean = loss.detach().to(at::kDouble);
    all_reduce(mean, rows_);
    return mean.item<double>() / rows_->getSize();
  }

 private:
  void shard(const DeviceMesh& mesh) {
    fully_shard(*net_->up, {.mesh = mesh});
    fully_shard(*net_, {.mesh = mesh});
  }

  GroupPtr rows_;  // whose ranks have other rows
  Net net_{nullptr};
  std::optional<DistributedDataParallel<Net>> ddp_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::unique_ptr<optim::CosineAnnealingLR> schedule_;
  GradScaler scaler_{{.device = at::kCPU, .init_scale = 16, .growth_interval = 2}};
};

class Resume : public ::testing::TestWithParam<std::string> {};

TEST_P(Resume, GivesTheBitsOfARunThatWasNotInterrupted) {
  testing::run_processes_in_gtest({.world_size = 4, .backend = "shm"}, [](const World& world) {
    const testing::TempDir own;
    const auto folder = broadcast_object(own.path(), 0);
    std::vector<double> whole;
    {
      Training training(GetParam(), world, 1, 0.3);
      dcp::CheckpointManager manager(folder, {.every = 1, .keep_last = 0});
      for (int64_t step = 0; step < kSteps; ++step) {
        whole.push_back(training.step(step));
        manager.save_if_due(step + 1, training.state());
      }
    }
    EXPECT_LT(whole.back(), whole.front());
    for (const int64_t from : {1, 4, 8}) {
      Training training(GetParam(), world, 2, 0.3);
      if (from == 4) training.step(50);  // an optimizer that has state
      const auto loaded = dcp::load(dcp::CheckpointManager(folder).path_of(from), training.state());
      ASSERT_EQ(loaded.step, from);
      for (int64_t step = from; step < kSteps; ++step) {
        EXPECT_EQ(training.step(step), whole[static_cast<std::size_t>(step)]) << "step " << step << " from " << from;
      }
    }
    barrier(world.group());
  });
}

INSTANTIATE_TEST_SUITE_P(Checkpoints, Resume, ::testing::Values("ddp", "zero 1", "zero 2", "fsdp", "2-D"),
                         [](const auto& test) {
                           auto name = test.param;
                           std::erase_if(name, [](char letter) { return letter == ' ' || letter == '-'; });
                           return name;
                         });

// Without dropout, so that there are losses to compare with.
TEST(ResumeElsewhere, GoesOnWithAnotherNumberOfRanksAndLayout) {
  testing::run_processes_in_gtest({.world_size = 4, .backend = "shm"}, [](const World& world) {
    const testing::TempDir own;
    const auto path = broadcast_object(own.path(), 0) + "/three";
    std::vector<double> whole;
    {
      Training training("fsdp", world, 1, 0);
      for (int64_t step = 0; step < kSteps; ++step) {
        whole.push_back(training.step(step));
        if (step == 2) dcp::save(path, training.state());
      }
    }
    for (const auto& layout : {"ddp", "zero 1", "zero 2", "fsdp", "2-D"}) {
      Training training(layout, world, 2, 0);
      dcp::load(path, training.state());
      for (int64_t step = 3; step < kSteps; ++step) {
        EXPECT_NEAR(training.step(step), whole[static_cast<std::size_t>(step)], 1e-5) << layout << ", step " << step;
      }
    }
    barrier(world.group());
  });
}

}  // namespace
}  // namespace lockstep
