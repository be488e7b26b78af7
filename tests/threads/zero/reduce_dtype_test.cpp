// Gradients that the second stage reduces in another dtype than their parameters'.
#include "lockstep/comm/collectives.h"
#include "lockstep/optim/grad_scaler.h"
#include "lockstep/testing/recorder.h"
#include "tests/support/zero_dtype_fixtures.h"

namespace lockstep::reduce_dtype_test {
namespace {

using namespace ddp_models;
using namespace zero_fixtures;
using namespace zero_dtype_fixtures;
using testing::expect_error;
using testing::Recorder;
using torch::optim::AdamW;
using torch::optim::SGD;
using torch::optim::SGDOptions;

/// Some backwards add up by no_sync() first.
template <class Ddp, class Step>
void train(const World& world, Ddp& ddp, int steps, const Step& step_once) {
  for (int step = 0; step < steps; ++step) {
    ddp.module()->zero_grad();
    if (step % 2 == 1) {
      const auto guard = ddp.no_sync();
      loss_of(ddp, world, 50 + step).backward();
    }
    loss_of(ddp, world, step).backward();
    step_once();
  }
}

// ZERO-67: Z-17: float gradients that travel in half of the bytes, as DDP's mixed_precision sends them
TEST(ZeroReduceDtype, GivesTheGradientsThatDdpsGives) {
  on_ranks(
      [](const World& world) {
        for (const auto dtype : {at::kBFloat16, at::kHalf, at::kDouble}) {
          auto options = small_buckets();
          options.mixed_precision = MixedPrecision{.reduce_dtype = dtype};
          DistributedDataParallel plain_ddp(mlp(kSizes), options);
          SGD plain(plain_ddp.parameters(), SGDOptions(0.1).momentum(0.9));
          train(world, plain_ddp, 4, [&] { plain.step(); });
          DistributedDataParallel ddp(mlp(kSizes), small_buckets());
          ZeroRedundancyOptimizer<SGD> zero(ddp.parameters(), SGDOptions(0.1).momentum(0.9),
                                            {.stage = ZeroStage::kGradients, .ddp = ddp, .reduce_dtype = dtype});
          train(world, ddp, 4, [&] { zero.step(); });
          expect_same(ddp.parameters(), plain_ddp.parameters(), std::string(c10::toString(dtype)), {1e-6});
        }
      },
      {1, 2, 3}, {"threads", "shm"});
}

// ZERO-67: what is sent is what was asked for
TEST(ZeroReduceDtype, IsWhatIsSent) {
  testing::run_threads_in_gtest({.world_size = 2, .backend = "threads"}, [](const World& world) {
    const auto bytes_sent = [&](const std::optional<at::ScalarType>& dtype) {
      DistributedDataParallel ddp(mlp(kSizes), small_buckets());
      ZeroRedundancyOptimizer<SGD> zero(ddp.parameters(), {0.1},
                                        {.stage = ZeroStage::kGradients, .ddp = ddp, .reduce_dtype = dtype});
      const Recorder recorder;
      loss_of(ddp, world, 0).backward();
      std::size_t bytes = 0;
      for (const auto& event : recorder.events("launch")) {
        if (event.kind == "reduce_scatter_tensor") bytes += event.bytes;
      }
      return bytes;
    };
    const auto own = bytes_sent(std::nullopt);
    EXPECT_GT(own, 0U);
    EXPECT_EQ(bytes_sent(at::kBFloat16) * 2, own);
    EXPECT_EQ(bytes_sent(at::kDouble), own * 2);
  });
}

// ZERO-67, ZERO-73: masters get all that was reduced, not what parameters could show
TEST(ZeroReduceDtype, ReachesMastersUnrounded) {
  on_ranks(
      [](const World& world) {
        MixedMlp model;
        MasterReference<AdamW> reference(model->parameters(), adamw());
        DistributedDataParallel ddp(MixedMlp(), small_buckets());
        ZeroRedundancyOptimizer<AdamW> zero(
            ddp.parameters(), adamw(),
            {.stage = ZeroStage::kGradients, .ddp = ddp, .master_dtype = at::kFloat, .reduce_dtype = at::kFloat});
        for (int step = 0; step < 5; ++step) {
          model->zero_grad();
          loss_of(model, world, step).backward();
          for (const auto& each : model->parameters()) {
            auto sum = each.grad().to(at::kFloat) * (1.0 / world.world_size());
            all_reduce(sum, world.group());
            each.mutable_grad() = sum;
          }
          reference.step();
          zero.zero_grad();
          loss_of(ddp, world, step).backward();
          zero.step();
          expect_same(ddp.parameters(), model->parameters(), std::to_string(step), {world.world_size() < 3 ? 0 : 1e-2});
        }
      },
      {1, 2, 3}, {"threads"});
}

// ZERO-67: averaged backwards add up, and a scaler may leave steps out
TEST(ZeroReduceDtype, GoesWithSeveralBackwardsAndGradScaler) {
  on_ranks(
      [](const World& world) {
        const auto run = [&](const std::optional<at::ScalarType>& dtype) {
          DistributedDataParallel ddp(mlp(kSizes), small_buckets());
          ZeroRedundancyOptimizer<SGD> zero(ddp.parameters(), SGDOptions(0.1).momentum(0.9),
                                            {.stage = ZeroStage::kGradients, .ddp = ddp, .reduce_dtype = dtype});
          GradScaler scaler({.device = at::kCPU, .init_scale = 4});
          for (int step = 0; step < 4; ++step) {
            zero.zero_grad();
            for (int i = 0; i < 2; ++i) {
              auto loss = loss_of(ddp, world, 10 * step + i);
              if (step == 1 && world.rank() == 0) loss = loss * std::numeric_limits<float>::infinity();
              scaler.scale(loss).backward();
            }
            scaler.step(zero);
            scaler.update();
          }
          EXPECT_EQ(scaler.get_scale(), 2);
          return copies_of(ddp.parameters());
        };
        const auto own = run(std::nullopt);
        expect_same(run(at::kDouble), own, "in double", {1e-5});
        expect_same(run(at::kBFloat16), own, "in bfloat16", {2e-2});
      },
      {1, 2, 3}, {"threads"});
}

// ZERO-67: where DDP reduces, it is DDP's to say; on every rank
TEST(ZeroReduceDtype, IsRefusedWhereDdpReduces) {
  on_ranks(
      [](const World& world) {
        DistributedDataParallel ddp(mlp(kSizes), world.group());
        for (const auto stage : {ZeroStage::kReplicated, ZeroStage::kState}) {
          expect_error(
              [&] {
                ZeroRedundancyOptimizer<SGD>(ddp.parameters(), {0.1},
                                             {.stage = stage, .ddp = ddp, .reduce_dtype = at::kBFloat16});
              },
              {"reduce_dtype is for ZeroStage::kGradients", "mixed_precision"});
        }
        expect_error(
            [&] {
              ZeroRedundancyOptimizer<SGD>(
                  ddp.parameters(), {0.1},
                  {.process_group = world.group(), .overlap_with_ddp = true, .reduce_dtype = at::kBFloat16});
            },
            {"reduce_dtype is for ZeroStage::kGradients"});
        for (const auto dtype : {at::kInt, at::kComplexFloat, at::kBool}) {
          expect_error(
              [&] {
                ZeroRedundancyOptimizer<SGD>(ddp.parameters(), {0.1},
                                             {.stage = ZeroStage::kGradients, .ddp = ddp, .reduce_dtype = dtype});
              },
              {"cannot be reduced in", "floating-point"});
        }
        // DDP is as it was.
        loss_of(ddp, world, 0).backward();
        EXPECT_TRUE(ddp.parameters()[0].grad().has_storage());
      },
      {1, 2, 3}, {"threads"});
}

}  // namespace
}  // namespace lockstep::reduce_dtype_test
