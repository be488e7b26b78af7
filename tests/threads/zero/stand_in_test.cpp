// Sharded gradients under programs that know nothing of them: what holds for any optimizer holds here, or throws.
#include <torch/nn/utils/clip_grad.h>

#include "lockstep/optim/clip_grad.h"
#include "lockstep/optim/grad_scaler.h"
#include "tests/support/zero_fixtures.h"

namespace lockstep::stand_in_test {
namespace {

using namespace ddp_models;
using testing::expect_error;
using torch::optim::AdamW;
using zero_fixtures::adamw;
using zero_fixtures::expect_same;
using zero_fixtures::kRows;
using zero_fixtures::kSizes;
using zero_fixtures::loss_of;
using zero_fixtures::on_ranks;
using zero_fixtures::small_buckets;
using Zero = ZeroRedundancyOptimizer<AdamW>;

/// The same on all ranks, and computed without DDP's forward.
at::Tensor penalty_of(const std::vector<at::Tensor>& parameters) {
  auto penalty = at::zeros({});
  for (const auto& parameter : parameters) penalty = penalty + parameter.pow(2).sum();
  return penalty * 0.01;
}

/// Calls train(ddp, model, optimizer) with a plain optimizer and with sharded gradients; parameters end up the same.
template <class Train>
void expect_parity(const Train& train) {
  const auto options = small_buckets();
  auto plain_model = mlp(kSizes);
  DistributedDataParallel plain_ddp(plain_model, options);
  AdamW plain(plain_ddp.parameters(), adamw());
  train(plain_ddp, plain_model, static_cast<torch::optim::Optimizer&>(plain));
  auto model = mlp(kSizes);
  DistributedDataParallel ddp(model, options);
  Zero zero(ddp.parameters(), adamw(), {.stage = ZeroStage::kGradients, .ddp = ddp});
  train(ddp, model, static_cast<torch::optim::Optimizer&>(zero));
  expect_same(ddp.parameters(), plain_ddp.parameters(), "", {1e-5});
}

const std::vector<int> kWorlds = {1, 2, 3};

// A-5, Z-4: a step that is left out, and everybody's zero_grad()
TEST(ZeroStandIn, IsDroppedByWhateverDropsAGradient) {
  enum class Way { kModule, kModuleToZero, kBase, kBaseToZero, kReset };
  on_ranks(
      [](const World& world) {
        for (const auto way : {Way::kModule, Way::kModuleToZero, Way::kBase, Way::kBaseToZero, Way::kReset}) {
          SCOPED_TRACE(static_cast<int>(way));
          expect_parity([&](auto& ddp, auto& model, torch::optim::Optimizer& optimizer) {
            const auto zero_grad = [&] {
              if (way == Way::kModule) model->zero_grad();
              if (way == Way::kModuleToZero) model->zero_grad(false);
              if (way == Way::kBase) optimizer.zero_grad();
              if (way == Way::kBaseToZero) optimizer.zero_grad(false);
              if (way == Way::kReset) {
                for (auto& parameter : model->parameters()) parameter.mutable_grad().reset();
              }
            };
            for (int step = 0; step < 4; ++step) {
              zero_grad();
              loss_of(ddp, world, step).backward();
              if (step != 1) optimizer.step();
            }
            // Between forward and backward, as tutorials have it.
            loss_of(ddp, world, 5).mul(1e6).backward();
            const auto loss = loss_of(ddp, world, 6);
            zero_grad();
            loss.backward();
            optimizer.step();
            zero_grad();
          });
        }
      },
      kWorlds, {"threads", "shm"});
}

// libtorch's DCGAN loop. The generator's loss leaves gradients in the discriminator.
TEST(ZeroStandIn, IsRightInTheLoopOfAGan) {
  on_ranks(
      [](const World& world) {
        const auto train = [&](auto& generator, auto& discriminator, auto& optimizer_g, auto& optimizer_d) {
          for (int step = 0; step < 3; ++step) {
            discriminator->zero_grad();
            const auto real = my_rows(random_batch(kRows, 6, step), world);
            discriminator(real).pow(2).mean().backward();
            const auto fake = generator(my_rows(random_batch(kRows, 4, 50 + step), world));
            discriminator(fake.detach()).sub(1).pow(2).mean().backward();
            optimizer_d.step();
            generator->zero_grad();
            discriminator(fake).pow(2).mean().backward();
            optimizer_g.step();
          }
        };
        const auto options = small_buckets();
        DistributedDataParallel plain_g(mlp({4, 20, 6}), options);
        DistributedDataParallel plain_d(mlp({6, 20, 3}), options);
        AdamW adam_g(plain_g.parameters(), adamw());
        AdamW adam_d(plain_d.parameters(), adamw());
        train(plain_g, plain_d, adam_g, adam_d);
        DistributedDataParallel ddp_g(mlp({4, 20, 6}), options);
        DistributedDataParallel ddp_d(mlp({6, 20, 3}), options);
        Zero zero_g(ddp_g.parameters(), adamw(), {.stage = ZeroStage::kGradients, .ddp = ddp_g});
        Zero zero_d(ddp_d.parameters(), adamw(), {.stage = ZeroStage::kGradients, .ddp = ddp_d});
        train(ddp_g, ddp_d, zero_g, zero_d);
        expect_same(ddp_g.parameters(), plain_g.parameters(), "generator", {1e-5});
        expect_same(ddp_d.parameters(), plain_d.parameters(), "discriminator", {1e-5});
      },
      kWorlds, {"threads", "shm"});
}

// backwards that DDP does not average, before, between and after those it does
TEST(ZeroStandIn, IsAddedToByASecondBackward) {
  on_ranks(
      [](const World& world) {
        const Warnings quiet;
        expect_parity([&](auto& ddp, auto& model, torch::optim::Optimizer& optimizer) {
          for (int step = 0; step < 4; ++step) {
            optimizer.zero_grad();
            if (step == 2) penalty_of(model->parameters()).backward();
            loss_of(ddp, world, step).backward();
            if (step != 1) penalty_of(model->parameters()).backward();
            if (step == 3) penalty_of(model->parameters()).backward();
            optimizer.step();
          }
        });
        // Micro-batches that end without a reduction, and a reduced one in front.
        expect_parity([&](auto& ddp, auto& /*model*/, torch::optim::Optimizer& optimizer) {
          for (int step = 0; step < 3; ++step) {
            optimizer.zero_grad();
            loss_of(ddp, world, 3 * step).backward();
            {
              const auto local = ddp.no_sync();
              loss_of(ddp, world, 3 * step + 1).backward();
            }
            loss_of(ddp, world, 3 * step + 2).backward();
            optimizer.step();
          }
        });
      },
      kWorlds, {"threads", "shm"});
}

// with parameters that a later backward does not use, whose gradients stay
TEST(ZeroStandIn, StaysWhereABackwardLeavesAParameterOut) {
  on_ranks(
      [](const World& world) {
        const DdpOptions options{
            .process_group = world.group(), .bucket_cap_mb = 0.0001, .find_unused_parameters = true};
        const auto train = [&](auto& ddp, torch::optim::Optimizer& optimizer) {
          for (int step = 0; step < 4; ++step) {
            optimizer.zero_grad();
            const auto batch = my_rows(random_batch(kRows, 4, step), world);
            ddp(batch, true, step % 2 == 0).pow(2).mean().backward();
            ddp(batch, false, step < 2).pow(2).mean().backward();
            optimizer.step();
          }
        };
        DistributedDataParallel plain_ddp(seeded(Branchy()), options);
        AdamW plain(plain_ddp.parameters(), adamw());
        train(plain_ddp, plain);
        DistributedDataParallel ddp(seeded(Branchy()), options);
        Zero zero(ddp.parameters(), adamw(), {.stage = ZeroStage::kGradients, .ddp = ddp});
        train(ddp, zero);
        expect_same(ddp.parameters(), plain_ddp.parameters(), "", {1e-5});
      },
      kWorlds, {"threads", "shm"});
}

// A-5, Z-15, U-4: gradients that are edited, element by element, and clipped by value
TEST(ZeroStandIn, IsEditedElementByElement) {
  on_ranks(
      [](const World& world) {
        const at::NoGradGuard no_grad;
        const auto with_grad = [](const auto& body) {
          const at::AutoGradMode on(true);
          body();
        };
        expect_parity([&](auto& ddp, auto& model, torch::optim::Optimizer& optimizer) {
          for (int step = 0; step < 6; ++step) {
            optimizer.zero_grad();
            with_grad([&] { loss_of(ddp, world, step).backward(); });
            for (auto& parameter : model->parameters()) {
              auto gradient = parameter.grad();
              if (step == 0) gradient.mul_(0.5).add_(parameter, 0.1);
              if (step == 1) parameter.mutable_grad().div_(at::full({}, 3.0)).clamp_(-0.01, 0.01);
              if (step == 2) parameter.mutable_grad() = parameter.detach() * 0.3;
              if (step == 3 && parameter.dim() > 1) parameter.mutable_grad().zero_();
              if (step == 4) gradient.data().neg_().nan_to_num_();
            }
            if (step == 5) torch::nn::utils::clip_grad_value_(model->parameters(), 0.005);
            optimizer.step();
          }
        });
        expect_parity([&](auto& ddp, auto& model, torch::optim::Optimizer& optimizer) {
          for (int step = 0; step < 3; ++step) {
            optimizer.zero_grad();
            with_grad([&] { loss_of(ddp, world, step).backward(); });
            clip_grad_value_(model->parameters(), 0.005);
            std::vector<at::Tensor> gradients;
            for (const auto& parameter : model->parameters()) gradients.push_back(parameter.grad());
            at::_foreach_mul_(gradients, 1.5);
            optimizer.step();
          }
        });
      },
      kWorlds, {"threads", "shm"});
}

// only what autograd adds is an accumulation, not what a hook adds while backward runs
TEST(ZeroStandIn, IsAddedToByAHookOfABackward) {
  on_ranks(
      [](const World& world) {
        const Warnings quiet;
        expect_parity([&](auto& ddp, auto& model, torch::optim::Optimizer& optimizer) {
          for (int step = 0; step < 3; ++step) {
            optimizer.zero_grad();
            loss_of(ddp, world, step).backward();
            const auto penalty = penalty_of(model->parameters());
            penalty.register_hook([&](const at::Tensor& /*gradient*/) {
              for (const auto& parameter : model->parameters()) {
                parameter.mutable_grad().add_(parameter.detach(), 0.5);
                parameter.mutable_grad().add_(at::full({1}, 0.25));
              }
            });
            penalty.backward();
            optimizer.step();
          }
        });
      },
      kWorlds, {"threads"});
}

// U-4, Z-15: Python's idiom, given the parameters
TEST(ZeroStandIn, IsClippedByTheNormOfTheParametersThatAreGiven) {
  on_ranks(
      [](const World& world) {
        for (const double norm_type : {2.0, 1.0, std::numeric_limits<double>::infinity()}) {
          std::vector<std::vector<double>> norms;
          expect_parity([&](auto& ddp, auto& model, torch::optim::Optimizer& optimizer) {
            auto& of_run = norms.emplace_back();
            for (int step = 0; step < 3; ++step) {
              optimizer.zero_grad();
              (loss_of(ddp, world, step) * 10).backward();
              const auto parameters = model->parameters();
              const NormOptions options{.norm_type = norm_type};
              if (step == 2) {
                // Of some of them.
                of_run.push_back(clip_grad_norm_({parameters[0], parameters[3]}, 0.01, options).item().toDouble());
              } else if (step == 1) {
                std::vector<at::Tensor> gradients;
                for (const auto& parameter : parameters) gradients.push_back(parameter.grad());
                const auto norm = get_total_norm(gradients, options);
                clip_grads_with_norm_(parameters, 0.05, norm, /*foreach=*/false);
                of_run.push_back(norm.item().toDouble());
              } else {
                of_run.push_back(clip_grad_norm_(parameters, 0.05, options).item().toDouble());
              }
              optimizer.step();
            }
          });
          for (std::size_t i = 0; i < norms[0].size(); ++i) {
            EXPECT_GT(norms[0][i], 0);
            EXPECT_NEAR(norms[1][i], norms[0][i], 1e-5 * norms[0][i]) << norm_type;
          }
        }
      },
      kWorlds, {"threads", "shm"});
}

// U-4: what cannot be known from a part is refused with the remedy, before anything is changed
TEST(ZeroStandIn, RefusesWhatNeedsTheWholeGradient) {
  on_ranks(
      [](const World& world) {
        auto model = mlp(kSizes);
        DistributedDataParallel ddp(model, small_buckets());
        Zero zero(ddp.parameters(), adamw(), {.stage = ZeroStage::kGradients, .ddp = ddp});
        DistributedDataParallel expected_ddp(mlp(kSizes), small_buckets());
        AdamW plain(expected_ddp.parameters(), adamw());
        loss_of(ddp, world, 1).backward();
        loss_of(expected_ddp, world, 1).backward();
        const auto all = model->parameters();
        const std::vector<std::string> remedy = {"'layer0.weight'", "clip_grad_norm_(optimizer"};
        expect_error([&] { torch::nn::utils::clip_grad_norm_(all, 1.0); }, remedy);
        expect_error([&] { torch::nn::utils::clip_grad_norm_(all, 1.0, std::numeric_limits<double>::infinity()); },
                     remedy);
        expect_error([&] { all[0].grad().norm(); }, remedy);
        expect_error([&] { all[0].grad().clone(); }, remedy);
        expect_error([&] { all[0].grad().sum().item<float>(); }, remedy);
        expect_error([&] { static_cast<void>(all[0].detach() + all[0].grad()); }, remedy);
        expect_error([&] { all[0].detach().add_(all[0].grad(), -0.1); }, remedy);
        expect_error([&] { all[0].grad().mul_(at::ones({40, 1})); }, remedy);
        EXPECT_EQ(all[0].grad().sizes(), all[0].sizes());
        // Nothing of it has changed anything.
        zero.step();
        plain.step();
        expect_same(ddp.parameters(), expected_ddp.parameters(), "", {1e-5});
        EXPECT_FALSE(all[0].grad().defined()) << "a step uses them up";
      },
      kWorlds, {"threads"});
}

// of a gradient that is kept while others are computed there is nothing left
TEST(ZeroStandIn, IsRefusedWhenItsGradientIsGone) {
  on_ranks(
      [](const World& world) {
        auto model = mlp(kSizes);
        DistributedDataParallel ddp(model, small_buckets());
        std::optional<Zero> zero(std::in_place, ddp.parameters(), adamw(),
                                 ZeroOptions{.stage = ZeroStage::kGradients, .ddp = ddp});
        loss_of(ddp, world, 0).backward();
        const auto parameter = model->parameters()[0];
        const auto kept = parameter.grad();
        const auto copy = parameter.grad().data();
        const auto kept_alone = model->parameters()[1].grad();
        model->zero_grad();
        expect_error([&] { kept.mul_(2); }, {"'layer0.weight'", "set to none"});
        loss_of(ddp, world, 1).backward();
        expect_error([&] { kept.mul_(2); }, {"is no more"});
        expect_error([&] { copy.zero_(); }, {"is no more"});
        expect_error([&] { kept_alone.mul_(2); }, {"is no more"});
        parameter.mutable_grad() = kept;
        expect_error([&] { zero->step(); }, {"is no more"});
        zero.reset();
        EXPECT_FALSE(model->parameters()[1].grad().defined());
        expect_error([&] { kept.mul_(2); }, {"is gone"});
      },
      {1}, {"threads"});
}

// what was local has been cut to this rank's part, so it cannot be averaged any more
TEST(ZeroStandIn, RefusesToAverageWhatWasClippedBefore) {
  on_ranks(
      [](const World& world) {
        DistributedDataParallel ddp(mlp(kSizes), small_buckets());
        Zero zero(ddp.parameters(), adamw(), {.stage = ZeroStage::kGradients, .ddp = ddp});
        const Warnings quiet;
        {
          const auto local = ddp.no_sync();
          loss_of(ddp, world, 0).backward();
        }
        clip_grad_norm_(zero, 1.0);
        expect_error([&] { loss_of(ddp, world, 1).backward(); }, {"was not averaged", "after the last backward"});
        zero.zero_grad();
        DistributedDataParallel expected_ddp(mlp(kSizes), small_buckets());
        AdamW plain(expected_ddp.parameters(), adamw());
        loss_of(ddp, world, 2).backward();
        loss_of(expected_ddp, world, 2).backward();
        zero.step();
        plain.step();
        expect_same(ddp.parameters(), expected_ddp.parameters(), "", {1e-5});
      },
      {2}, {"threads", "shm"});
}

// of a bucket some gradients may be dropped, and others added to
TEST(ZeroStandIn, IsDroppedForSomeParametersOfABucket) {
  on_ranks(
      [](const World& world) {
        expect_parity([&](auto& ddp, auto& model, torch::optim::Optimizer& optimizer) {
          for (int step = 0; step < 4; ++step) {
            optimizer.zero_grad();
            loss_of(ddp, world, 2 * step).backward();
            for (std::size_t i = step % 2; i < model->parameters().size(); i += 2) {
              model->parameters()[i].mutable_grad().reset();
            }
            loss_of(ddp, world, 2 * step + 1).backward();
            optimizer.step();
          }
        });
      },
      kWorlds, {"threads"});
}

// Z-4: no rank leaves out a step that others take, whoever forgot to say so
TEST(ZeroStandIn, LeavesOutAStepOnAllRanksInEveryStage) {
  on_ranks(
      [](const World& world) {
        for (const auto stage : {ZeroStage::kState, ZeroStage::kGradients}) {
          auto model = mlp(kSizes);
          DistributedDataParallel ddp(model, small_buckets());
          Zero zero(ddp.parameters(), adamw(), {.stage = stage, .ddp = ddp});
          DistributedDataParallel plain_ddp(mlp(kSizes), small_buckets());
          AdamW plain(plain_ddp.parameters(), adamw());
          GradScaler scaler({.device = at::kCPU, .init_scale = 1024});
          for (int step = 0; step < 4; ++step) {
            // A step uses divided gradients up, also one that is left out.
            if (stage == ZeroStage::kState) model->zero_grad();
            plain.zero_grad();
            scaler.scale(loss_of(ddp, world, step)).backward();
            loss_of(plain_ddp, world, step).backward();
            if (step == 1 && world.rank() == 0) {
              zero.own_gradients()[0].gradients.at(0).fill_(std::numeric_limits<float>::infinity());
            }
            scaler.step(zero);
            scaler.update();
            if (step != 1) plain.step();
          }
          EXPECT_EQ(scaler.get_scale(), 512) << "one step was left out";
          expect_same(ddp.parameters(), plain_ddp.parameters(), std::to_string(static_cast<int>(stage)), {1e-5});
        }
      },
      {1, 2, 3}, {"threads", "shm"});
}

// What was added is zeroed with it, and factors may be tensors, also for a gradient of one element.
TEST(ZeroStandIn, IsZeroedWithWhatWasAddedAndScaledByTensors) {
  on_ranks(
      [](const World& world) {
        const std::vector<int64_t> sizes = {6, 8, 1};
        const auto train = [&](auto& ddp, torch::optim::Optimizer& optimizer) {
          for (int step = 0; step < 3; ++step) {
            ddp(my_rows(random_batch(kRows, 6, step), world)).pow(2).mean().backward();
            penalty_of(ddp.parameters()).backward();
            for (auto& parameter : ddp.parameters()) parameter.mutable_grad().mul_(at::scalar_tensor(0.5F));
            optimizer.zero_grad(/*set_to_none=*/false);
            ddp(my_rows(random_batch(kRows, 6, 10 + step), world)).pow(2).mean().backward();
            for (auto& parameter : ddp.parameters()) parameter.mutable_grad().mul_(at::scalar_tensor(0.5F));
            optimizer.step();
            optimizer.zero_grad();
          }
        };
        DistributedDataParallel plain_ddp(mlp(sizes), world.group());
        AdamW plain(plain_ddp.parameters(), adamw());
        train(plain_ddp, plain);
        DistributedDataParallel ddp(mlp(sizes), world.group());
        Zero zero(ddp.parameters(), adamw(), {.stage = ZeroStage::kGradients, .ddp = ddp});
        train(ddp, zero);
        expect_same(ddp.parameters(), plain_ddp.parameters(), "", {1e-5});
      },
      kWorlds, {"threads"});
}

// another wrapper averages whole gradients, of which every rank uses its shard
TEST(ZeroStandIn, IsNotNeededWhereTheModuleIsWrappedAnew) {
  on_ranks(
      [](const World& world) {
        auto model = mlp(kSizes);
        auto ddp = std::make_unique<DistributedDataParallel<Mlp>>(model, small_buckets());
        Zero zero(ddp->parameters(), adamw(), {.stage = ZeroStage::kGradients, .ddp = *ddp});
        DistributedDataParallel plain_ddp(mlp(kSizes), small_buckets());
        AdamW plain(plain_ddp.parameters(), adamw());
        const Warnings warnings;
        for (int step = 0; step < 4; ++step) {
          if (step == 2) {
            ddp.reset();
            ddp = std::make_unique<DistributedDataParallel<Mlp>>(model, small_buckets());
          }
          zero.zero_grad();
          plain.zero_grad();
          loss_of(*ddp, world, step).backward();
          loss_of(plain_ddp, world, step).backward();
          zero.step();
          plain.step();
          expect_same(model->parameters(), plain_ddp.parameters(), std::to_string(step), {1e-5});
        }
        EXPECT_EQ(warnings.count("wrapped anew, make the optimizer anew too"), 1);
      },
      {1, 2, 3}, {"threads", "shm"});
}

}  // namespace
}  // namespace lockstep::stand_in_test
