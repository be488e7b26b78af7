// ZeroRedundancyOptimizer on an accelerator: two ranks share one GPU by gloo, one rank has NCCL.
#include "lockstep/comm/values.h"
#include "lockstep/optim/grad_scaler.h"
#include "tests/support/zero_overlap_fixtures.h"

namespace lockstep {
namespace {

using namespace zero_overlap_fixtures;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

class ZeroOnGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    if (gpu_count() == 0) GTEST_SKIP() << "no GPU";
  }

  static void on_gpu(const testing::RankBody& body) {
    testing::run_threads_in_gtest({.world_size = 2, .backend = "gloo"}, body);
    testing::run_threads_in_gtest({.world_size = 1, .backend = "nccl"}, body);
  }

  static Mlp model_on(const World& world) {
    auto model = mlp(kSizes);
    model->to(world.device());
    return model;
  }

  /// Steps `first` to `last` - 1.
  template <class Ddp>
  static void train(Ddp& ddp, torch::optim::Optimizer& optimizer, const World& world, int first, int last,
                    const std::function<void()>& clip) {
    for (int step = first; step < last; ++step) {
      zero_grads(ddp);
      loss_of(ddp, world, step).backward();
      clip();
      optimizer.step();
    }
  }
  template <class Ddp>
  static at::Tensor loss_of(Ddp& ddp, const World& world, int step) {
    return ddp(my_rows(random_batch(kRows, kSizes[0], step), world).to(world.device())).pow(2).mean();
  }

  static std::vector<ZeroOptions> ways() {
    return {{.stage = ZeroStage::kReplicated},
            {},
            {.parameters_as_bucket_view = true},
            {.partition = ZeroPartition::kElements},
            {.stage = ZeroStage::kGradients}};
  }
};

// ZERO-3, ZERO-72: gradients of several devices, one of them of the host
TEST_F(ZeroOnGpu, GradientsOfSeveralDevicesAreClippedTogether) {
  testing::run_threads_in_gtest({.world_size = 1}, [](const World& world) {
    const auto made = [&](c10::Device second) {
      const auto parameters = zero_fixtures::parameters_of({{4, 3}, {5}});
      std::vector<at::Tensor> placed = {parameters[0].detach().requires_grad_(),
                                        parameters[1].detach().to(second).requires_grad_()};
      for (const auto& each : placed) each.mutable_grad() = each.detach() * 3;
      return placed;
    };
    const auto expect_same_gradients = [](const std::vector<at::Tensor>& actual,
                                          const std::vector<at::Tensor>& expected) {
      for (std::size_t i = 0; i < actual.size(); ++i) {
        EXPECT_TRUE(at::allclose(actual[i].grad().cpu(), expected[i].grad(), 1e-5, 1e-6)) << i;
      }
    };
    for (const bool foreach : {true, false}) {
      const auto mixed = made(world.device());
      const auto expected = made(at::kCPU);
      const auto norm = clip_grad_norm_(mixed, 0.5, {.foreach = foreach});
      const auto expected_norm = clip_grad_norm_(expected, 0.5, {.foreach = foreach});
      EXPECT_TRUE(at::allclose(norm.cpu(), expected_norm, 1e-5, 1e-6));
      expect_same_gradients(mixed, expected);
      clip_grad_value_(mixed, 0.01, foreach);
      clip_grad_value_(expected, 0.01, foreach);
      expect_same_gradients(mixed, expected);
    }
  });
}

// ZERO-6, ZERO-26, ZERO-35, ZERO-38, ZERO-67, ZERO-68, ZERO-72
TEST_F(ZeroOnGpu, EqualsThePlainOptimizerAndItsState) {
  on_gpu([](const World& world) {
    DistributedDataParallel plain_ddp(model_on(world), world.group(), small_buckets());
    AdamW plain(plain_ddp.parameters(), AdamWOptions(0.02));
    const auto clip = [&] { clip_grad_norm_(plain_ddp.parameters(), 0.1); };
    train(plain_ddp, plain, world, 0, 6, clip);
    for (auto options : ways()) {
      std::optional<OptimizerStateDict> half;
      const auto run = [&](auto kind) {
        using Optim = typename decltype(kind)::type;
        DistributedDataParallel ddp(model_on(world), world.group(), small_buckets());
        options.ddp = ddp;
        ZeroRedundancyOptimizer<Optim> zero(ddp.parameters(), {0.02}, options);
        EXPECT_TRUE(zero.join_device().is_cuda());
        train(ddp, zero, world, 0, 3, [&] { zero.clip_grad_norm_(0.1); });
        for (int to = world.world_size() - 1; to >= 0; --to) {
          zero.consolidate_state_dict(to);
          if (world.rank() != to) continue;
          half = zero.state_dict();
        }
        for (const auto& [index, values] : half->state) {
          for (const auto& [name, value] : values) EXPECT_TRUE(!value.isTensor() || value.toTensor().is_cpu()) << name;
        }
        zero.load_state_dict(*half);
        train(ddp, zero, world, 3, 6, [&] { zero.clip_grad_norm_(0.1); });
        zero_fixtures::expect_same(ddp.parameters(), plain_ddp.parameters(), "", {1e-4});
      };
      run(std::type_identity<AdamW>());
    }
  });
}

// ZERO-68
TEST_F(ZeroOnGpu, FusedKernelsAgree) {
  on_gpu([](const World& world) {
    DistributedDataParallel plain_ddp(model_on(world), world.group());
    AdamW plain(plain_ddp.parameters(), AdamWOptions(0.02));
    train(plain_ddp, plain, world, 0, 4, [] {});
    for (auto options : ways()) {
      DistributedDataParallel ddp(model_on(world), world.group());
      options.ddp = ddp;
      ZeroRedundancyOptimizer<optim::AdamW> zero(ddp.parameters(), {.lr = 0.02}, options);
      train(ddp, zero, world, 0, 4, [] {});
      zero_fixtures::expect_same(ddp.parameters(), plain_ddp.parameters(), "", {1e-4});
    }
  });
}

// ZERO-72
TEST_F(ZeroOnGpu, StepsThatOverflowAreLeftOutOnAllRanks) {
  on_gpu([](const World& world) {
    for (auto options : ways()) {
      DistributedDataParallel ddp(model_on(world), world.group(), small_buckets());
      options.ddp = ddp;
      ZeroRedundancyOptimizer<optim::AdamW> zero(ddp.parameters(), {.lr = 0.02}, options);
      GradScaler scaler({.init_scale = 1024, .process_group = world.group()});
      for (int step = 0; step < 3; ++step) {
        const auto before = copies_of(ddp.parameters());
        zero.zero_grad();
        auto loss = loss_of(ddp, world, step);
        if (step == 1 && world.rank() == 0) loss = loss * std::numeric_limits<float>::infinity();
        scaler.scale(loss).backward();
        scaler.step(zero);
        scaler.update();
        EXPECT_EQ(at::equal(ddp.parameters()[0], before[0]), step == 1);
      }
      EXPECT_EQ(scaler.get_scale(), 512);
    }
  });
}

// ZERO-55, ZERO-56, ZERO-57
TEST_F(ZeroOnGpu, OverlapEqualsAPlainOptimizer) {
  on_gpu([](const World& world) {
    DistributedDataParallel plain_ddp(model_on(world), world.group());
    SGD plain(plain_ddp.parameters(), sgd());
    train(plain_ddp, plain, world, 2, 7, [] {});
    for (const auto form : {Form::kAfterLast, Form::kInterleaved}) {
      for (const bool shards : {false, true}) {
        DistributedDataParallel ddp(model_on(world), world.group(), small_buckets());
        Zero zero(ddp.parameters(), sgd(), overlapped(world.group()));
        ddp.register_comm_hook(hook_of(form, ddp, zero, shards));
        for (int step = 0; step < 7; ++step) {
          zero_grads(ddp);
          loss_of(ddp, world, step).backward();
        }
        zero_fixtures::expect_same(ddp.parameters(), plain_ddp.parameters(), "", {1e-4});
      }
    }
  });
}

// ZERO-43
TEST_F(ZeroOnGpu, ObjectsAreLoadedOntoTheDevice) {
  on_gpu([](const World& world) {
    const auto sent = world.rank() == 0 ? c10::IValue(at::arange(5)) : c10::IValue();
    const auto got = broadcast_value(sent, 0, world.group(), world.device()).toTensor();
    EXPECT_TRUE(got.is_cuda());
    EXPECT_TRUE(at::equal(got.cpu(), at::arange(5)));
  });
}

}  // namespace
}  // namespace lockstep
