// One option from plain data parallelism to sharded gradients: the same parameters, and less memory.
#include "lockstep/optim/clip_grad.h"
#include "lockstep/optim/grad_scaler.h"
#include "lockstep/testing/interpose.h"
#include "lockstep/testing/memory_probe.h"
#include "lockstep/testing/recorder.h"
#include "lockstep/zero/streaming.h"
#include "tests/support/zero_fixtures.h"

namespace lockstep {
namespace {

using namespace ddp_models;
using testing::expect_error;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using zero_fixtures::adamw;
using zero_fixtures::copies_of;
using zero_fixtures::expect_same;
using zero_fixtures::expect_same_state;
using zero_fixtures::kRows;
using zero_fixtures::kSizes;
using zero_fixtures::loss_of;
using zero_fixtures::on_ranks;
using zero_fixtures::small_buckets;
using zero_fixtures::Within;
using Zero = ZeroRedundancyOptimizer<AdamW>;

const std::vector<ZeroStage> kStages = {ZeroStage::kReplicated, ZeroStage::kState, ZeroStage::kGradients};

template <class Ddp>
ZeroOptions at_stage(ZeroStage stage, Ddp& ddp) {
  return {.stage = stage, .ddp = ddp};
}

std::string name_of(ZeroStage stage) {
  return "stage " + std::to_string(static_cast<int>(stage));
}

/// gloo adds up in another order for a sum that is scattered.
Within bits_or_close(const World& world) {
  return world.group()->getBackend(at::kCPU)->getBackendName() == "gloo" && world.world_size() > 2 ? Within{1e-5}
                                                                                                   : Within{};
}

/// Parameters after DDP and a plain optimizer did `train`, and after DDP and ZeRO in every stage did.
template <class Train>
void expect_parity(const World& world, const DdpOptions& options, const Train& train) {
  DistributedDataParallel plain_ddp(mlp(kSizes), options);
  AdamW plain(plain_ddp.parameters(), adamw());
  train(plain_ddp, plain);
  for (const auto stage : kStages) {
    DistributedDataParallel ddp(mlp(kSizes), options);
    Zero zero(ddp.parameters(), adamw(), at_stage(stage, ddp));
    train(ddp, zero);
    expect_same(ddp.parameters(), plain_ddp.parameters(), name_of(stage), bits_or_close(world));
  }
}

// ZERO-67
TEST(ZeroStages, EndInTheSameParameters) {
  on_ranks([](const World& world) {
    for (const bool is_static : {false, true}) {
      for (const bool is_batched : {false, true}) {
        auto options = small_buckets();
        options.static_graph = is_static;
        options.batched_grad_copy = is_batched;
        expect_parity(world, options, [&](auto& ddp, auto& optimizer) {
          for (int step = 0; step < 4; ++step) {
            optimizer.zero_grad();
            loss_of(ddp, world, step).backward();
            optimizer.step();
          }
        });
      }
    }
  });
}

// ZERO-67
TEST(ZeroStages, AddUpGradientsOfSeveralBackwards) {
  on_ranks([](const World& world) {
    expect_parity(world, small_buckets(), [&](auto& ddp, auto& optimizer) {
      for (int step = 0; step < 9; step += 3) {
        optimizer.zero_grad();
        {
          const auto local = ddp.no_sync();
          loss_of(ddp, world, step).backward();
        }
        loss_of(ddp, world, step + 1).backward();
        optimizer.step();
      }
    });
  });
}

// ZERO-67
TEST(ZeroStages, WeighSamplesAlike) {
  on_ranks([](const World& world) {
    expect_parity(world, small_buckets(), [&](auto& ddp, auto& optimizer) {
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        // Products with single rows would round by where parameters lie.
        const int64_t rows = 8 * (world.rank() + 1);
        ddp.backward(ddp(random_batch(rows, kSizes[0], 10 * step + world.rank())).pow(2).mean(), rows);
        optimizer.step();
      }
    });
  });
}

// ZERO-67: backwards that are all averaged add up in the slices.
TEST(ZeroStages, AddUpAveragedGradients) {
  on_ranks([](const World& world) {
    DistributedDataParallel plain_ddp(mlp(kSizes), small_buckets());
    DistributedDataParallel ddp(mlp(kSizes), small_buckets());
    AdamW plain(plain_ddp.parameters(), adamw());
    Zero zero(ddp.parameters(), adamw(), at_stage(ZeroStage::kGradients, ddp));
    for (int step = 0; step < 6; ++step) {
      // The sum of the averages, however DDP would come to it.
      std::vector<at::Tensor> sums;
      for (int i = 0; i < 2; ++i) {
        plain.zero_grad();
        loss_of(plain_ddp, world, 2 * step + i).backward();
        const auto gradients = gradients_of(plain_ddp);
        for (std::size_t j = 0; j < gradients.size(); ++j)
          i == 0 ? sums.push_back(gradients[j]) : void(sums[j] += gradients[j]);
        loss_of(ddp, world, 2 * step + i).backward();
      }
      const auto parameters = plain_ddp.parameters();
      for (std::size_t j = 0; j < sums.size(); ++j) parameters[j].mutable_grad() = sums[j];
      plain.step();
      zero.step();  // uses them up, so that zero_grad() is not needed
      expect_same(ddp.parameters(), plain_ddp.parameters(), "", bits_or_close(world));
    }
    // What a skipped step leaves behind must not reach the next one.
    loss_of(ddp, world, 77).mul(1e6).backward();
    zero.zero_grad();
    plain.zero_grad();
    loss_of(ddp, world, 78).backward();
    loss_of(plain_ddp, world, 78).backward();
    zero.step();
    plain.step();
    expect_same(ddp.parameters(), plain_ddp.parameters(), "after zero_grad", bits_or_close(world));
  });
}

// ZERO-67: what no rank uses gets no update, in the step in which it is so.
TEST(ZeroStages, LeaveUnusedParametersAlone) {
  on_ranks([](const World& world) {
    DdpOptions options{.process_group = world.group(), .bucket_cap_mb = 0.0001, .find_unused_parameters = true};
    const auto train = [&](auto& ddp, auto& optimizer) {
      for (int step = 0; step < 6; ++step) {
        optimizer.zero_grad();
        const auto batch = my_rows(random_batch(kRows, 4, step), world);
        // The left branch: nowhere, on one rank, everywhere.
        ddp(batch, step % 3 == 2 || (step % 3 == 1 && world.rank() == 0), true).pow(2).mean().backward();
        optimizer.step();
      }
    };
    DistributedDataParallel plain_ddp(seeded(Branchy()), options);
    AdamW plain(plain_ddp.parameters(), adamw());
    train(plain_ddp, plain);
    for (const auto stage : kStages) {
      DistributedDataParallel ddp(seeded(Branchy()), options);
      Zero zero(ddp.parameters(), adamw(), at_stage(stage, ddp));
      train(ddp, zero);
      expect_same(ddp.parameters(), plain_ddp.parameters(), name_of(stage), bits_or_close(world));
      zero.consolidate_state_dict();
      if (world.rank() == 0) expect_same_state(zero.state_dict(), state_dict_of(plain), bits_or_close(world));
    }
  });
}

// ZERO-67
TEST(ZeroStages, TakeGroupsWithOptionsOfTheirOwn) {
  on_ranks([](const World& world) {
    const auto groups_of = [](const std::vector<at::Tensor>& parameters) {
      std::vector<at::Tensor> weights;
      std::vector<at::Tensor> biases;
      for (const auto& each : parameters) (each.dim() > 1 ? weights : biases).push_back(each);
      return std::vector<torch::optim::OptimizerParamGroup>{
          {weights, std::make_unique<AdamWOptions>(adamw())},
          {biases, std::make_unique<AdamWOptions>(adamw().weight_decay(0).lr(0.05))}};
    };
    DistributedDataParallel plain_ddp(mlp(kSizes), small_buckets());
    AdamW plain(groups_of(plain_ddp.parameters()), adamw());
    const auto train = [&](auto& ddp, auto& optimizer) {
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        loss_of(ddp, world, step).backward();
        optimizer.step();
      }
    };
    train(plain_ddp, plain);
    for (const auto stage : kStages) {
      DistributedDataParallel ddp(mlp(kSizes), small_buckets());
      Zero zero(groups_of(ddp.parameters()), adamw(), at_stage(stage, ddp));
      train(ddp, zero);
      expect_same(ddp.parameters(), plain_ddp.parameters(), name_of(stage), bits_or_close(world));
    }
  });
}

// ZERO-67: state goes from stage to stage, and is that of the plain optimizer.
TEST(ZeroStages, ExchangeTheirState) {
  on_ranks([](const World& world) {
    DistributedDataParallel plain_ddp(mlp(kSizes), small_buckets());
    AdamW plain(plain_ddp.parameters(), adamw());
    std::optional<OptimizerStateDict> carried;
    int step = 0;
    for (const auto stage : {ZeroStage::kGradients, ZeroStage::kReplicated, ZeroStage::kGradients, ZeroStage::kState}) {
      DistributedDataParallel next(mlp(kSizes), small_buckets());
      {
        const at::NoGradGuard no_grad;
        for (std::size_t i = 0; i < next.parameters().size(); ++i)
          next.parameters()[i].copy_(plain_ddp.parameters()[i]);
      }
      Zero zero(next.parameters(), adamw(), at_stage(stage, next));
      if (carried) zero.load_state_dict(*carried);
      for (int i = 0; i < 2; ++i, ++step) {
        plain.zero_grad();
        loss_of(plain_ddp, world, step).backward();
        loss_of(next, world, step).backward();
        plain.step();
        zero.step();
        zero.zero_grad();
      }
      expect_same(next.parameters(), plain_ddp.parameters(), name_of(stage), bits_or_close(world));
      for (int to = 0; to < world.world_size(); ++to) zero.consolidate_state_dict(to);
      const bool is_last = world.rank() == world.world_size() - 1;
      if (is_last) {
        EXPECT_EQ(zero.state_dict().state.size(), plain_ddp.parameters().size());
      } else {
        expect_error([&] { zero.state_dict(); }, {"was not consolidated"});
      }
      consolidate_in_chunks(zero, {.to = 0, .max_bytes = 4096});
      if (world.rank() == 0) expect_same_state(zero.state_dict(), state_dict_of(plain), bits_or_close(world));
      carried = state_dict_of(plain);
    }
  });
}

// ZERO-67, ZERO-72
TEST(ZeroStages, ClipAndScaleAlike) {
  on_ranks([](const World& world) {
    const auto scaler_of = [&] {
      return GradScaler({.device = at::kCPU, .init_scale = 1024, .process_group = world.group()});
    };
    const auto overflows_at = [&](int step) { return step == 1 && world.rank() == 0; };
    const auto train = [&](auto& ddp, auto& optimizer, const auto& clip) {
      auto scaler = scaler_of();
      std::vector<double> norms;
      for (int step = 0; step < 4; ++step) {
        optimizer.zero_grad();
        auto loss = loss_of(ddp, world, step);
        if (overflows_at(step)) loss = loss * std::numeric_limits<float>::infinity();
        scaler.scale(loss).backward();
        scaler.unscale_(optimizer);
        norms.push_back(clip().template item<double>());
        scaler.step(optimizer);
        scaler.update();
      }
      EXPECT_EQ(scaler.get_scale(), 512) << "one step was left out";
      return norms;
    };
    DistributedDataParallel plain_ddp(mlp(kSizes), small_buckets());
    AdamW plain(plain_ddp.parameters(), adamw());
    const auto expected = train(plain_ddp, plain, [&] { return clip_grad_norm_(plain_ddp.parameters(), 0.05); });
    for (const auto stage : kStages) {
      DistributedDataParallel ddp(mlp(kSizes), small_buckets());
      Zero zero(ddp.parameters(), adamw(), at_stage(stage, ddp));
      const auto norms = train(ddp, zero, [&] { return zero.clip_grad_norm_(0.05); });
      for (std::size_t i : {0, 2, 3}) EXPECT_NEAR(norms[i], expected[i], 1e-5 * expected[i]) << name_of(stage);
      expect_same(ddp.parameters(), plain_ddp.parameters(), name_of(stage), {1e-5});
    }
  });
}

// ZERO-67, ZERO-72: clip_grad_norm_(optimizer) and clip_grad_value_(optimizer) know where gradients are.
TEST(ZeroStages, AreClippedLikeAnyOptimizer) {
  enum class Clip { kNot, kByNorm, kByValue };
  const auto train = [](const World& world, auto& ddp, torch::optim::Optimizer& optimizer, Clip clip) {
    std::vector<double> norms;
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      (loss_of(ddp, world, step) * 10).backward();
      if (clip == Clip::kByNorm) norms.push_back(clip_grad_norm_(optimizer, 0.05).item<double>());
      if (clip == Clip::kByValue) clip_grad_value_(optimizer, 0.002);
      optimizer.step();
    }
    return norms;
  };
  using ZeroSgd = ZeroRedundancyOptimizer<optim::SGD>;
  const optim::SGDOptions sgd{.lr = 0.5, .momentum = 0.5};
  on_ranks(
      [&](const World& world) {
        DistributedDataParallel unclipped(mlp(kSizes), small_buckets());
        optim::SGD without(unclipped.parameters(), sgd);
        train(world, unclipped, without, Clip::kNot);
        for (const auto clip : {Clip::kByNorm, Clip::kByValue}) {
          DistributedDataParallel plain_ddp(mlp(kSizes), small_buckets());
          optim::SGD plain(plain_ddp.parameters(), sgd);
          const auto expected = train(world, plain_ddp, plain, clip);
          EXPECT_FALSE(at::allclose(plain_ddp.parameters()[0], unclipped.parameters()[0])) << "clipping does something";
          for (const auto stage : kStages) {
            DistributedDataParallel ddp(mlp(kSizes), small_buckets());
            ZeroSgd zero(ddp.parameters(), sgd, at_stage(stage, ddp));
            const auto norms = train(world, ddp, zero, clip);
            for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(norms[i], expected[i], 1e-5 * expected[i]);
            expect_same(ddp.parameters(), plain_ddp.parameters(), name_of(stage), {1e-5});
          }
        }
      },
      {1, 2, 3});
}

// ZERO-67, ZERO-72: a shard that overflows on one rank, a scaler that was told no group, and zero_grad() through the
// base class, which reaches no sharded gradients
TEST(ZeroStages, LeaveOutStepsWithoutBeingToldTheGroup) {
  on_ranks(
      [](const World& world) {
        const auto train = [&](auto& ddp, torch::optim::Optimizer& optimizer, const auto& overflow) {
          GradScaler scaler({.device = at::kCPU, .init_scale = 1024});
          for (int step = 0; step < 4; ++step) {
            optimizer.zero_grad();
            scaler.scale(loss_of(ddp, world, step)).backward();
            if (step == 1) overflow();
            scaler.step(optimizer);
            scaler.update();
          }
          EXPECT_EQ(scaler.get_scale(), 512) << "one step was left out";
        };
        const auto kBad = std::numeric_limits<float>::infinity();
        DistributedDataParallel plain_ddp(mlp(kSizes), small_buckets());
        AdamW plain(plain_ddp.parameters(), adamw());
        train(plain_ddp, plain, [&] { plain_ddp.parameters()[0].mutable_grad().fill_(kBad); });
        DistributedDataParallel ddp(mlp(kSizes), small_buckets());
        Zero zero(ddp.parameters(), adamw(), at_stage(ZeroStage::kGradients, ddp));
        train(ddp, zero, [&] {
          if (world.rank() == 0) zero.own_gradients()[0].gradients.at(0).fill_(kBad);
        });
        expect_same(ddp.parameters(), plain_ddp.parameters(), "", {1e-5});
      },
      {1, 2, 3});
}

// ZERO-67, JOIN-47: ranks without inputs step the slices they own.
TEST(ZeroStages, JoinWithUnevenInputs) {
  on_ranks([](const World& world) {
    for (const bool divides_by_all : {true, false}) {
      const auto train = [&](auto& ddp, auto& optimizer, std::vector<Joinable*> joinables) {
        Join scope(std::move(joinables), {.options = {.divide_by_initial_world_size = divides_by_all}});
        scope.run([&] {
          for (int step = 0; step < 2 + 2 * world.rank(); ++step) {
            optimizer.zero_grad();
            loss_of(ddp, world, step).backward();
            optimizer.step();
          }
        });
      };
      DistributedDataParallel expected(mlp(kSizes), small_buckets());
      Zero state(expected.parameters(), adamw(), at_stage(ZeroStage::kState, expected));
      train(expected, state, {&expected, &state});
      DistributedDataParallel ddp(mlp(kSizes), small_buckets());
      Zero zero(ddp.parameters(), adamw(), at_stage(ZeroStage::kGradients, ddp));
      train(ddp, zero, {&ddp, &zero});
      expect_same(ddp.parameters(), expected.parameters(), "", bits_or_close(world));
    }
  });
}

// ZERO-67
TEST(ZeroStages, KeepASliceOfTheGradientsAndTwoBuckets) {
  on_ranks(
      [](const World& world) {
        // Twelve buckets of a layer each.
        const std::vector<int64_t> sizes(13, 64);
        constexpr int64_t kLayer = 4 * (64 * 64 + 64);
        DistributedDataParallel ddp(mlp(sizes), {.process_group = world.group(), .bucket_cap_mb = 0.001});
        Zero zero(ddp.parameters(), adamw(), at_stage(ZeroStage::kGradients, ddp));
        int64_t most = 0;
        const auto parameters = ddp.parameters();
        for (const auto& parameter : parameters) {
          parameter.register_hook([&](const at::Tensor&) {
            int64_t whole = 0;
            for (const auto& each : parameters)
              whole += each.grad().defined() ? static_cast<int64_t>(each.grad().nbytes()) : 0;
            most = std::max(most, whole);
          });
        }
        for (int step = 0; step < 3; ++step) {
          ddp(random_batch(kRows, 64, step)).pow(2).mean().backward();
          for (const auto& each : parameters) EXPECT_FALSE(each.grad().has_storage()) << "it stands in for a slice";
          zero.step();
        }
        const auto report = zero.memory_report();
        const auto all = report.parameters;
        EXPECT_EQ(all, 12 * kLayer);
        EXPECT_LE(most, kLayer) << "of whole gradients while backward runs";
        const auto alignment = 12 * 64;
        EXPECT_LE(report.gradients, all / world.world_size() + alignment);
        EXPECT_GE(report.gradients, all / world.world_size());
        EXPECT_EQ(report.temporaries, ddp.engine().reducer()->pool_bytes());
        EXPECT_LE(ddp.engine().reducer()->pool_bytes(), 2 * (kLayer + world.world_size() * 64));
        EXPECT_GT(ddp.engine().reducer()->pool_bytes(), 0);
      },
      {2, 4}, {"threads", "shm"});
}

// ZERO-67: every bucket's all-gather is on its way before the first is waited for
TEST(ZeroStages, SendAllParametersAtOnce) {
  on_ranks(
      [](const World& world) {
        DistributedDataParallel ddp(mlp(std::vector<int64_t>(7, 64)),
                                    {.process_group = world.group(), .bucket_cap_mb = 0.001});
        Zero zero(ddp.parameters(), adamw(), at_stage(ZeroStage::kGradients, ddp));
        for (int step = 0; step < 2; ++step) {
          ddp(random_batch(kRows, 64, step)).pow(2).mean().backward();
          const testing::Recorder recorder;
          zero.step();
          if (step == 0) continue;  // in which ranks compare too
          std::vector<std::string> states;
          for (const auto& event : recorder.events()) {
            if (event.kind == "all_gather_into_tensor") states.push_back(event.state);
          }
          const auto first_done = std::find(states.begin(), states.end(), "done");
          EXPECT_EQ(first_done - states.begin(), 6);
          EXPECT_EQ(std::count(states.begin(), states.end(), "launch"), 6);
        }
      },
      {2, 3}, {"threads", "shm", "gloo"});
}

/// Adagrad, which makes its state at once, and notes for how many elements on this rank.
struct Measured : torch::optim::Adagrad {
  using Options = torch::optim::AdagradOptions;
  static constexpr bool kIsElementwise = true;
  static inline thread_local int64_t most = 0;
  explicit Measured(const std::vector<torch::optim::OptimizerParamGroup>& groups, Options options)
      : Adagrad(groups, options) {
    int64_t elements = 0;
    for (const auto& group : param_groups()) {
      for (const auto& parameter : group.params()) elements += parameter.numel();
    }
    most = std::max(most, elements);
  }
};

// ZERO-67, ZERO-74: construction must not make all state only to try whether it can be made
TEST(ZeroStages, MakeStateOfTheShardOnly) {
  on_ranks(
      [](const World& world) {
        const std::vector<int64_t> sizes(9, 128);
        DistributedDataParallel ddp(mlp(sizes), {.process_group = world.group(), .bucket_cap_mb = 0.001});
        int64_t all = 0;
        for (const auto& parameter : ddp.parameters()) all += parameter.numel();
        Measured::most = 0;
        const testing::MemoryProbe probe;
        ZeroRedundancyOptimizer<Measured> zero(ddp.parameters(), Measured::Options(0.1),
                                               at_stage(ZeroStage::kGradients, ddp));
        constexpr int64_t kAlignment = 8 * 16;  // a slice of each of eight buckets
        EXPECT_LE(Measured::most, all / world.world_size() + kAlignment);
        // The buffers that parameters move to, and this rank's part of gradients and state.
        EXPECT_LE(probe.total().peak_bytes, 4 * (all + 2 * all / world.world_size() + all / 8));
      },
      {4}, {"threads"});
}

/// Most bytes that the first backward takes, and what was taken for gradients before it.
int64_t peak_of_gradients(const World& world, ZeroStage stage, const std::vector<int64_t>& sizes) {
  DistributedDataParallel ddp(mlp(sizes), {.process_group = world.group(), .bucket_cap_mb = 0.001});
  Zero zero(ddp.parameters(), adamw(), at_stage(stage, ddp));
  const auto loss = ddp(random_batch(1, sizes[0], 0)).pow(2).mean();
  const testing::MemoryProbe probe;
  loss.backward();
  return probe.total().peak_bytes + zero.memory_report().gradients;
}

// ZERO-67
TEST(ZeroStages, TakeTheMemoryOfASliceAndAFewBucketsForGradients) {
  on_ranks(
      [](const World& world) {
        const std::vector<int64_t> sizes(17, 64);
        constexpr int64_t kLayer = 4 * (64 * 64 + 64);
        const auto all = 16 * kLayer;
        EXPECT_GE(peak_of_gradients(world, ZeroStage::kState, sizes), all);
        // Two buckets under way, and of whole gradients those of one layer, which autograd has twice for a moment.
        constexpr int64_t kLoss = 64;
        EXPECT_LE(peak_of_gradients(world, ZeroStage::kGradients, sizes),
                  all / world.world_size() + 4 * kLayer + kLoss);
      },
      {2, 4}, {"threads"});
}

// ZERO-67
TEST(ZeroStages, RefuseWhatCannotBe) {
  on_ranks(
      [](const World& world) {
        const auto plain = mlp(kSizes);
        expect_error(
            [&] {
              Zero(plain->parameters(), adamw(),
                   ZeroOptions{.process_group = world.group(), .stage = ZeroStage::kGradients});
            },
            {"needs the DistributedDataParallel", ".ddp = ddp"});
        const auto with = [&](const DdpOptions& options) {
          DistributedDataParallel ddp(mlp(kSizes), options);
          const Zero zero(ddp.parameters(), adamw(), at_stage(ZeroStage::kGradients, ddp));
        };
        auto options = small_buckets();
        options.gradient_as_bucket_view = true;
        expect_error([&] { with(options); }, {"gradient_as_bucket_view", "ZeroStage::kGradients"});
        options = small_buckets();
        options.mixed_precision = MixedPrecision{.param_dtype = at::kBFloat16};
        expect_error([&] { with(options); }, {"already: mixed_precision", "ZeroStage::kGradients"});

        DistributedDataParallel ddp(mlp(kSizes), small_buckets());
        const auto all = ddp.parameters();
        const auto refused = [&](std::vector<at::Tensor> parameters, ZeroOptions zero,
                                 const std::vector<std::string>& parts) {
          zero.stage = ZeroStage::kGradients;
          zero.ddp = ddp;
          expect_error([&] { Zero(std::move(parameters), adamw(), std::move(zero)); }, parts);
        };
        refused(all, {.parameters_as_bucket_view = true}, {"parameters_as_bucket_view"});
        refused(all, {.partition = ZeroPartition::kParameters}, {"by elements"});
        refused(all, {.overlap_with_ddp = true}, {"overlap_with_ddp"});
        refused(all, {.params_per_rank = {{all[0]}, {all[1]}}}, {"params_per_rank"});
        refused({all.begin() + 1, all.end()}, {}, {"'layer0.weight'", "not in the optimizer"});
        auto more = all;
        more.push_back(at::ones({3}).requires_grad_());
        refused(more, {}, {"parameter 8", "not one that DDP averages"});
        refused(all, {.process_group = new_group(world.group(), {0, 1})}, {"group must be DDP's"});

        std::optional<Zero> zero(std::in_place, all, adamw(), at_stage(ZeroStage::kGradients, ddp));
        expect_error([&] { ddp.register_comm_hook(allreduce_hook(world.group())); }, {"ZeroStage::kGradients"});
        refused(all, {}, {"ZeroStage::kGradients"});
        expect_error([&] { zero->add_param_group({{at::ones({2}).requires_grad_()}}); }, {"no group can be added"});
        loss_of(ddp, world, 0).backward();
        all[0].requires_grad_(false);
        expect_error([&] { zero->step(); }, {"frozen"});
        all[0].requires_grad_(true);
        zero->step();
        zero.reset();
        loss_of(ddp, world, 1).backward();
        EXPECT_TRUE(all[0].grad().defined()) << "DDP averages again";
        expect_error([&] { Zero(all, adamw().lr(-1), at_stage(ZeroStage::kGradients, ddp)); }, {"learning rate", "-1"});
        zero_grads(ddp);
        loss_of(ddp, world, 1).backward();
        EXPECT_TRUE(all[0].grad().defined()) << "nothing was changed";
        zero_grads(ddp);
        zero.emplace(all, adamw(), at_stage(ZeroStage::kGradients, ddp));
        loss_of(ddp, world, 1).backward();
        EXPECT_FALSE(all[0].grad().has_storage()) << "it stands in for a slice";
      },
      {2}, {"threads"});
}

// ZERO-67
TEST(ZeroStages, WarnOfGradientsThatAreNotUsed) {
  on_ranks(
      [](const World& /*world*/) {
        auto model = mlp(kSizes);
        DistributedDataParallel ddp(model, small_buckets());
        Zero zero(ddp.parameters(), adamw(), at_stage(ZeroStage::kGradients, ddp));
        const Warnings warnings;
        zero.step();
        EXPECT_EQ(warnings.count("uses no gradient"), 0) << "there is none";
        model->forward(random_batch(2, kSizes[0], 1)).sum().backward();
        zero.step();
        zero.step();
        EXPECT_EQ(warnings.count("uses no gradient"), 1);
      },
      {2}, {"threads"});
}

// ZERO-67: of a backward that failed on the way nothing is used.
TEST(ZeroStages, GoOnAfterABackwardThatFailed) {
  on_ranks(
      [](const World& world) {
        DistributedDataParallel ddp(mlp(kSizes), small_buckets());
        Zero zero(ddp.parameters(), adamw(), at_stage(ZeroStage::kGradients, ddp));
        DistributedDataParallel expected(mlp(kSizes), small_buckets());
        AdamW plain(expected.parameters(), adamw());
        loss_of(ddp, world, 5).backward();
        auto throws = true;
        const auto first = ddp.parameters()[0];
        first.register_hook([&](const at::Tensor&) { TORCH_CHECK(!throws, "a hook of the program failed"); });
        expect_error([&] { loss_of(ddp, world, 6).backward(); }, {"a hook of the program failed"});
        throws = false;
        // As after any backward that failed: the step is given up, on all ranks.
        ddp.engine().reducer()->reset_state();
        zero.zero_grad();
        plain.zero_grad();
        loss_of(ddp, world, 7).backward();
        loss_of(expected, world, 7).backward();
        zero.step();
        plain.step();
        expect_same(ddp.parameters(), expected.parameters(), "", bits_or_close(world));
      },
      {2}, {"threads", "shm"});
}

// ZERO-67: of a reduction that failed nothing is added to what earlier backwards left, and the step can be repeated.
TEST(ZeroStages, RepeatABackwardWhoseReductionFailed) {
  on_ranks(
      [](const World& world) {
        DistributedDataParallel ddp(mlp(kSizes), small_buckets());
        Zero zero(ddp.parameters(), adamw(), at_stage(ZeroStage::kGradients, ddp));
        DistributedDataParallel expected_ddp(mlp(kSizes), small_buckets());
        Zero expected(expected_ddp.parameters(), adamw(), at_stage(ZeroStage::kGradients, expected_ddp));
        for (int step = 0; step < 3; ++step) {
          for (int i = 0; i < 2; ++i) {
            if (step == 1) {
              const auto failing = testing::fail_call(CallKind::kReduceScatterSingle, 1, "no way out");
              expect_error([&] { loss_of(ddp, world, 2 * step + i).backward(); }, {"no way out"});
            }
            loss_of(ddp, world, 2 * step + i).backward();
            loss_of(expected_ddp, world, 2 * step + i).backward();
          }
          zero.step();
          zero.zero_grad();
          expected.step();
          expected.zero_grad();
        }
        expect_same(ddp.parameters(), expected_ddp.parameters(), "", bits_or_close(world));
      },
      {2}, {"threads", "shm"});
}

}  // namespace
}  // namespace lockstep
