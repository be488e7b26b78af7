// Training over real backends, ranks being processes: the same as one process, with zero-copy buckets where there are.
#include <signal.h>

#include "tests/support/ddp_models.h"

namespace lockstep {
namespace {

using namespace ddp_models;
using testing::expect_error;

class DdpProcesses : public ::testing::TestWithParam<std::tuple<std::string, int>> {};

// DDP-36, DDP-39
TEST_P(DdpProcesses, TrainLikeOneProcessWithTheWholeBatch) {
  const auto [backend, ranks] = GetParam();
  const auto batch = random_batch(12, 6, 3);
  auto model = mlp({6, 50, 3});
  torch::optim::SGD reference(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < 5; ++step) {
    reference.zero_grad();
    model->forward(batch).pow(2).mean().backward();
    reference.step();
  }
  testing::run_processes_in_gtest({.world_size = ranks, .backend = backend}, [&](const World& world) {
    for (const bool as_view : {false, true}) {
      DistributedDataParallel ddp(mlp({6, 50, 3}, 7 + world.rank()), world.group(),
                                  {.bucket_cap_mb = 0.0005, .gradient_as_bucket_view = as_view});
      torch::optim::SGD optimizer(ddp.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
      for (int step = 0; step < 5; ++step) {
        optimizer.zero_grad();
        ddp(my_rows(batch, world)).pow(2).mean().backward();
        optimizer.step();
      }
      expect_close(ddp.parameters(), model->parameters());
      EXPECT_GT(ddp.bucket_plan().buckets().size(), 1U);
    }
  });
}

// DDP-60
TEST_P(DdpProcesses, SumSparseGradients) {
  const auto [backend, ranks] = GetParam();
  testing::run_processes_in_gtest({.world_size = ranks, .backend = backend}, [&](const World& world) {
    torch::nn::Embedding table(torch::nn::EmbeddingOptions(20, 3).sparse(true));
    DistributedDataParallel ddp(seeded(table), world.group());
    for (int step = 0; step < 2; ++step) {
      zero_grads(ddp);
      ddp(at::tensor({0, 5 + world.rank(), 5})).sum().backward();
      const auto dense = table->weight.grad().to_dense();
      EXPECT_FLOAT_EQ(dense[0][0].item<float>(), 1);
      EXPECT_FLOAT_EQ(dense.sum().item<float>(), 9);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Backends, DdpProcesses,
                         ::testing::Combine(::testing::Values("shm", "gloo"), ::testing::Values(1, 2, 3, 4)),
                         [](const auto& info) {
                           return std::get<0>(info.param) + std::to_string(std::get<1>(info.param));
                         });

// DDP-28: buckets lie where the other ranks can reach them.
TEST(DdpZeroCopy, BucketsLieInMemoryTheOtherRanksReach) {
  testing::run_processes_in_gtest({.world_size = 2, .backend = "shm"}, [](const World& world) {
    DistributedDataParallel ddp(mlp({6, 5}), world.group());
    const auto buffer = ddp.engine().reducer()->get_grad_buckets(false)[0].buffer();
    const auto backend = world.group()->getBackend(at::kCPU);
    EXPECT_EQ(buffer.storage().data_ptr().get_deleter(),
              backend->allocateTensor(4, at::kFloat).storage().data_ptr().get_deleter());
  });
}

// On the same data all runs give the same bits, on all ranks.
TEST(DdpDeterminism, RunsAndRanksHaveTheSameBits) {
  testing::run_processes_in_gtest({.world_size = 3, .backend = "shm"}, [](const World& world) {
    std::vector<at::Tensor> first;
    for (int run = 0; run < 2; ++run) {
      DistributedDataParallel ddp(mlp({6, 50, 3}), world.group());
      torch::optim::SGD optimizer(ddp.parameters(), 0.1);
      for (int step = 0; step < 4; ++step) {
        optimizer.zero_grad();
        ddp(random_batch(5, 6, 100 * step + world.rank())).pow(2).mean().backward();
        optimizer.step();
      }
      if (first.empty()) first = ddp.parameters();
      expect_close(ddp.parameters(), first, 0);
    }
    for (const auto& parameter : first) {
      auto copy = parameter.detach().clone();
      broadcast(copy, 0, world.group());
      EXPECT_TRUE(at::equal(copy, parameter));
    }
  });
}

constexpr int kSawIt = 42;

// A rank that dies in the middle of training is named by all others.
TEST(DdpFailure, OfAKilledRankIsNamed) {
  const auto report = testing::run_processes_from_gtest(
      {.world_size = 3, .backend = "shm", .timeout = std::chrono::seconds(60), .expected_exit_code = kSawIt},
      [](const World& world) {
        DistributedDataParallel ddp(mlp({6, 5}), world.group());
        const auto step = [&] { ddp(random_batch(2, 6, 1)).sum().backward(); };
        step();
        if (world.rank() == 1) ::raise(SIGKILL);
        expect_error(step, {"rank 1", "gone"});
        if (!::testing::Test::HasFailure()) std::_Exit(kSawIt);
      });
  if (testing::is_rank_process()) return;
  for (const int rank : {0, 2}) {
    EXPECT_EQ(report.ranks[rank].kind, testing::RankOutcome::Kind::kPassed) << report.describe();
  }
}

}  // namespace
}  // namespace lockstep
