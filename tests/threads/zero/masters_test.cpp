// Masters: parameters of low precision that are stepped as float copies, which are divided as state is.
#include <torch/optim/lbfgs.h>
#include <torch/serialize.h>

#include <sstream>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/objects.h"
#include "lockstep/join/join.h"
#include "lockstep/optim/clip_grad.h"
#include "lockstep/optim/grad_scaler.h"
#include "lockstep/state/python_format.h"
#include "lockstep/testing/temp_dir.h"
#include "lockstep/zero/streaming.h"
#include "tests/support/zero_dtype_fixtures.h"

namespace lockstep::masters_test {
namespace {

using namespace zero_fixtures;
using namespace zero_dtype_fixtures;
using ddp_models::Warnings;
using testing::expect_error;
using testing::TempDir;
using torch::optim::Adam;
using torch::optim::AdamOptions;
using torch::optim::AdamW;
using torch::optim::SGD;
using torch::optim::SGDOptions;

std::vector<std::pair<std::string, ZeroOptions>> master_ways(const GroupPtr& group) {
  auto all = ways(group);
  all.emplace_back("replicated", ZeroOptions{.process_group = group, .stage = ZeroStage::kReplicated});
  for (auto& [name, zero] : all) zero.master_dtype = at::kFloat;
  return all;
}

template <class Optim, class Options>
void expect_same_as_reference(const World& world, const Options& options) {
  for (const auto& [name, zero] : master_ways(world.group())) {
    const auto parameters = mixed_parameters(kLowAndFull);
    MasterReference<Optim> reference(copies_of(parameters), options);
    ZeroRedundancyOptimizer<Optim> optimizer(parameters, options, zero);
    for (int step = 0; step < 12; ++step) {
      set_gradients(parameters, step);
      set_gradients(reference.parameters(), step);
      // Some have none now and then, so that runs are cut anew.
      if (step % 3 == 1) {
        for (const auto i : {0, 5}) {
          parameters[i].mutable_grad().reset();
          reference.parameters()[i].mutable_grad().reset();
        }
      }
      optimizer.step();
      reference.step();
      expect_same(parameters, reference.parameters(), name + ", step " + std::to_string(step));
    }
    optimizer.consolidate_state_dict(0);
    if (world.rank() != 0) continue;
    auto expected = state_dict_of(reference.plain());
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (parameters[i].scalar_type() == at::kFloat) continue;
      expected.state[static_cast<int64_t>(i)].emplace("master_param", reference.masters()[i].detach());
    }
    expect_same_state(optimizer.state_dict(), expected);
  }
}

// ZERO-73: Z-17: one process that steps float copies and rounds them back: the same bits
TEST(ZeroMasters, StepAsOneProcessDoesOnFloatCopies) {
  on_ranks(
      [](const World& world) {
        expect_same_as_reference<SGD>(world, SGDOptions(0.1).momentum(0.9).weight_decay(0.01));
        expect_same_as_reference<SGD>(world, SGDOptions(0.1));
        expect_same_as_reference<Adam>(world, AdamOptions(0.02));
        expect_same_as_reference<AdamW>(world, adamw());
      },
      {1, 2, 3}, {"threads", "shm"});
}

// ZERO-73: small changes are not lost in rounding
TEST(ZeroMasters, KeepChangesThatParametersCannotShow) {
  on_ranks(
      [](const World& world) {
        for (const auto& [name, zero] : master_ways(world.group())) {
          const std::vector<at::Tensor> parameters = {at::ones({5}, at::kBFloat16).requires_grad_(),
                                                      at::ones({4}, at::kHalf).requires_grad_()};
          ZeroRedundancyOptimizer<SGD> optimizer(parameters, {1e-4}, zero);
          for (int step = 0; step < 1000; ++step) {
            for (const auto& each : parameters) each.mutable_grad() = at::ones_like(each.detach());
            optimizer.step();
          }
          for (const auto& each : parameters) EXPECT_NEAR(each.to(at::kFloat).mean().item<float>(), 0.9, 0.003) << name;
        }
      },
      {2}, {"threads"});
}

// ZERO-73: in all stages with DDP, also with gradients that are divided; no_sync() adds up
TEST(ZeroMasters, StepGradientsThatDdpHasAveraged) {
  on_ranks(
      [](const World& world) {
        const auto train = [&](auto& ddp, const auto& zero_grad, const auto& step_once) {
          for (int step = 0; step < 5; ++step) {
            zero_grad();
            if (step % 2 == 1) {
              const auto guard = ddp.no_sync();
              loss_of(ddp, world, 50 + step).backward();
            }
            loss_of(ddp, world, step).backward();
            step_once();
          }
        };
        DistributedDataParallel plain_ddp(MixedMlp(), small_buckets());
        MasterReference<AdamW> reference(plain_ddp.parameters(), adamw());
        train(plain_ddp, [&] { plain_ddp.module()->zero_grad(); }, [&] { reference.step(); });
        for (const auto stage : {ZeroStage::kReplicated, ZeroStage::kState, ZeroStage::kGradients}) {
          DistributedDataParallel ddp(MixedMlp(), small_buckets());
          ZeroRedundancyOptimizer<AdamW> zero(ddp.parameters(), adamw(),
                                              {.stage = stage, .ddp = ddp, .master_dtype = at::kFloat});
          train(ddp, [&] { zero.zero_grad(); }, [&] { zero.step(); });
          expect_same(ddp.parameters(), plain_ddp.parameters(), std::to_string(static_cast<int>(stage)));
        }
      },
      {1, 2, 3}, {"threads"});
}

// ZERO-73: ZeRO's point
TEST(ZeroMasters, AreDividedAmongTheRanks) {
  on_ranks(
      [](const World& world) {
        for (const auto& [name, zero] : master_ways(world.group())) {
          const auto parameters = mixed_parameters(kLowAndFull);
          int64_t low = 0;
          for (const auto& each : parameters) low += each.scalar_type() == at::kFloat ? 0 : each.numel();
          const ZeroRedundancyOptimizer<SGD> optimizer(parameters, {0.1}, zero);
          auto bytes = at::full({1}, optimizer.memory_report().state, at::kLong);
          if (name != "replicated") all_reduce(bytes, world.group());
          EXPECT_EQ(bytes.item<int64_t>(), 4 * low) << name;
        }
      },
      {1, 2, 3}, {"threads"});
}

// ZERO-73: torch::load(), a copy into parameters, other memory: before the first step and later
TEST(ZeroMasters, FollowParametersThatAreChanged) {
  enum class Way { kLoad, kCopy, kSetData, kThroughAlias };
  const auto change = [](const std::vector<at::Tensor>& parameters, Way way) {
    const at::NoGradGuard no_grad;
    const auto others = mixed_parameters(kLowAndFull, 17);
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      auto parameter = parameters[i];
      // Some stay, and keep what they cannot show.
      if (i == 2) continue;
      if (way == Way::kCopy) parameter.copy_(others[i]);
      if (way == Way::kThroughAlias) parameter.data().copy_(others[i]);
      if (way == Way::kSetData) parameter.set_data(others[i].detach().clone());
      if (way == Way::kLoad) {
        std::stringstream file;
        torch::save(others[i].detach(), file);
        at::Tensor loaded;
        torch::load(loaded, file);
        parameter.set_data(loaded);
      }
    }
  };
  on_ranks(
      [&](const World& world) {
        for (const auto& [name, zero] : master_ways(world.group())) {
          for (const auto way : {Way::kLoad, Way::kCopy, Way::kSetData, Way::kThroughAlias}) {
            for (const int changed_at : {0, 2}) {
              const auto parameters = mixed_parameters(kLowAndFull);
              MasterReference<AdamW> reference(copies_of(parameters), adamw());
              ZeroRedundancyOptimizer<AdamW> optimizer(parameters, adamw(), zero);
              for (int step = 0; step < 4; ++step) {
                if (step == changed_at) {
                  const auto kept = reference.masters()[2].detach().clone();
                  change(parameters, way);
                  change(reference.parameters(), Way::kCopy);
                  reference.restart();
                  reference.masters()[2].detach().copy_(kept);
                  // What is saved now is not what was before.
                  optimizer.consolidate_state_dict(0);
                  if (world.rank() == 0) {
                    EXPECT_TRUE(optimizer.state_dict()
                                    .state.at(0)
                                    .at("master_param")
                                    .toTensor()
                                    .equal(reference.masters()[0].detach()));
                  }
                }
                set_gradients(parameters, step);
                set_gradients(reference.parameters(), step);
                optimizer.step();
                reference.step();
              }
              expect_same(parameters, reference.parameters(), name + " " + std::to_string(static_cast<int>(way)));
            }
          }
        }
      },
      {1, 2, 3}, {"threads"});
}

// ZERO-73: a module that is loaded after the optimizer was made, in the second stage too
TEST(ZeroMasters, FollowAModuleThatIsLoaded) {
  on_ranks(
      [](const World& world) {
        std::stringstream saved;
        torch::save(MixedMlp(23), saved);
        const auto bytes = saved.str();
        const auto run = [&](auto& module, auto& ddp, const auto& restart, const auto& step_once) {
          for (int step = 0; step < 4; ++step) {
            if (step == 2) {
              std::stringstream file(bytes);
              torch::load(module, file);
              restart();
            }
            module->zero_grad();
            loss_of(ddp, world, step).backward();
            step_once();
          }
        };
        MixedMlp plain_model;
        DistributedDataParallel plain_ddp(plain_model, small_buckets());
        MasterReference<AdamW> reference(plain_ddp.parameters(), adamw());
        run(plain_model, plain_ddp, [&] { reference.restart(); }, [&] { reference.step(); });
        for (const auto stage : {ZeroStage::kState, ZeroStage::kGradients}) {
          MixedMlp model;
          DistributedDataParallel ddp(model, small_buckets());
          ZeroRedundancyOptimizer<AdamW> zero(ddp.parameters(), adamw(),
                                              {.stage = stage, .ddp = ddp, .master_dtype = at::kFloat});
          run(model, ddp, [] {}, [&] { zero.step(); });
          expect_same(model->parameters(), plain_model->parameters(), std::to_string(static_cast<int>(stage)));
        }
      },
      {1, 2, 3}, {"threads"});
}

/// Trains on from `dict`, or from what `load` loads, as the reference does that was never interrupted.
template <class Load>
void expect_goes_on(const World& world, const std::string& name, const ZeroOptions& zero,
                    const std::vector<at::Tensor>& at_save, const Load& load) {
  const auto continued = mixed_parameters(kLowAndFull);
  MasterReference<AdamW> reference(copies_of(continued), adamw());
  const auto parameters = copies_of(at_save);
  ZeroRedundancyOptimizer<AdamW> optimizer(parameters, adamw(), zero);
  load(optimizer);
  for (int step = 0; step < 6; ++step) {
    set_gradients(reference.parameters(), step);
    reference.step();
    if (step < 3) continue;
    set_gradients(parameters, step);
    optimizer.step();
    expect_same(parameters, reference.parameters(), name + " at " + std::to_string(world.world_size()));
  }
}

// ZERO-73: state of one number of ranks and division goes to every other, masters with it
TEST(ZeroMasters, AreSavedAndLoadedAtAnyNumberOfRanks) {
  std::vector<std::pair<OptimizerStateDict, std::vector<at::Tensor>>> saves;
  const TempDir folder;
  on_ranks(
      [&](const World& world) {
        for (const auto& [name, zero] : master_ways(world.group())) {
          const auto parameters = mixed_parameters(kLowAndFull);
          ZeroRedundancyOptimizer<AdamW> optimizer(parameters, adamw(), zero);
          for (int step = 0; step < 3; ++step) {
            set_gradients(parameters, step);
            optimizer.step();
          }
          optimizer.consolidate_state_dict(0);
          save_sharded(optimizer, folder.file("sharded " + name));
          save_in_chunks(optimizer, folder.file("chunks " + name), {.to = 0, .max_bytes = 64});
          if (world.rank() == 0) {
            torch::save(optimizer, folder.file("archive " + name));
            save_python_state(folder.file("python " + name), optimizer.state_dict());
            saves.emplace_back(optimizer.state_dict(), copies_of(parameters));
          }
        }
      },
      {2}, {"threads"});
  on_ranks(
      [&](const World& world) {
        for (const auto& [name, zero] : master_ways(world.group())) {
          for (const auto& [dict, parameters] : saves) {
            expect_goes_on(world, name, zero, parameters, [&](auto& optimizer) { optimizer.load_state_dict(dict); });
          }
          for (const auto& [from, ignored] : ways(world.group())) {
            const auto& parameters = saves.front().second;
            expect_goes_on(world, name + " archive " + from, zero, parameters,
                           [&](auto& optimizer) { torch::load(optimizer, folder.file("archive " + from)); });
            expect_goes_on(world, name + " python " + from, zero, parameters, [&](auto& optimizer) {
              optimizer.load_state_dict(load_python_state(folder.file("python " + from)));
            });
            for (const auto* kind : {"sharded ", "chunks "}) {
              expect_goes_on(world, name + kind + from, zero, parameters,
                             [&](auto& optimizer) { load_sharded(optimizer, folder.file(kind + from)); });
            }
          }
        }
      },
      {1, 2, 3}, {"threads"});
}

// ZERO-73: the order of a checkpoint's two files does not matter
TEST(ZeroMasters, AreKeptWhenTheModelOfTheirSaveIsLoaded) {
  on_ranks(
      [](const World& world) {
        for (const auto& [name, zero] : master_ways(world.group())) {
          const auto trained = mixed_parameters(kLowAndFull);
          MasterReference<AdamW> reference(trained, adamw());
          for (int step = 0; step < 3; ++step) {
            set_gradients(trained, step);
            reference.step();
          }
          auto dict = state_dict_of(reference.plain());
          for (std::size_t i = 0; i < trained.size(); ++i) {
            if (trained[i].scalar_type() == at::kFloat) continue;
            dict.state[static_cast<int64_t>(i)].emplace("master_param", reference.masters()[i].detach().clone());
          }
          const auto saved = copies_of(trained);
          expect_goes_on(world, name, zero, mixed_parameters(kLowAndFull), [&](auto& optimizer) {
            optimizer.load_state_dict(dict);
            const at::NoGradGuard no_grad;
            const auto& now = optimizer.param_groups()[0].params();
            for (std::size_t i = 0; i < now.size(); ++i) now[i].detach().copy_(saved[i]);
          });
        }
      },
      {1, 2, 3}, {"threads"});
}

// ZERO-73: state of a run without masters
TEST(ZeroMasters, AreMadeFromParametersWhereTheStateHasNone) {
  on_ranks(
      [](const World& world) {
        for (const auto& [name, zero] : master_ways(world.group())) {
          const auto parameters = mixed_parameters(kLowAndFull);
          const auto before = copies_of(parameters);
          AdamW plain(before, adamw());
          set_gradients(before, 1);
          plain.step();
          ZeroRedundancyOptimizer<AdamW> optimizer(parameters, adamw(), zero);
          set_gradients(parameters, 2);
          optimizer.step();
          const auto now = copies_of(parameters);
          optimizer.load_state_dict(state_dict_of(plain));
          optimizer.consolidate_state_dict(0);
          if (world.rank() != 0) continue;
          for (const auto& [index, values] : optimizer.state_dict().state) {
            EXPECT_EQ(values.at("exp_avg").toTensor().scalar_type(), at::kFloat) << name;
            if (now[index].scalar_type() == at::kFloat) continue;
            EXPECT_TRUE(values.at("master_param").toTensor().equal(now[index].detach().to(at::kFloat))) << name;
          }
        }
      },
      {1, 2, 3}, {"threads"});
}

// ZERO-73: on every rank
TEST(ZeroMasters, RefuseWhatTheyCannotDo) {
  on_ranks(
      [](const World& world) {
        const auto parameters = mixed_parameters(kLowAndFull);
        const auto refuses = [&](const ZeroOptions& zero, const std::vector<std::string>& words) {
          expect_error([&] { ZeroRedundancyOptimizer<SGD>(parameters, {0.1}, zero); }, words);
        };
        for (const auto dtype : {at::kInt, at::kHalf, at::kBFloat16, at::kComplexFloat}) {
          refuses({.process_group = world.group(), .master_dtype = dtype}, {"masters cannot be", "at::kFloat"});
        }
        refuses({.process_group = world.group(), .overlap_with_ddp = true, .master_dtype = at::kFloat},
                {"master_dtype", "overlap_with_ddp"});
        expect_error(
            [&] {
              ZeroRedundancyOptimizer<torch::optim::LBFGS>(
                  parameters, {},
                  {.process_group = world.group(), .stage = ZeroStage::kReplicated, .master_dtype = at::kFloat});
            },
            {"LBFGS", "master_dtype"});
        ZeroRedundancyOptimizer<SGD> with(parameters, {0.1},
                                          {.process_group = world.group(), .master_dtype = at::kFloat});
        set_gradients(parameters, 0);
        with.step();
        for (int rank = 0; rank < world.world_size(); ++rank) with.consolidate_state_dict(rank);
        with.consolidate_state_dict(0);
        OptimizerStateDict dict;
        if (world.rank() == 0) dict = with.state_dict();
        if (world.rank() != 0) return;
        const auto others = copies_of(parameters);
        ZeroRedundancyOptimizer<SGD> without(others, {0.1}, {.process_group = world.group()});
        expect_error([&] { without.load_state_dict(dict); }, {"has a master", "ZeroOptions::master_dtype"});
        const auto full = mixed_parameters({at::kFloat});
        ZeroRedundancyOptimizer<SGD> wider(
            full, {0.1}, {.process_group = world.group(), .stage = ZeroStage::kReplicated, .master_dtype = at::kFloat});
        expect_error([&] { wider.load_state_dict(dict); }, {"masters of Float", "parameter of Float"});
      },
      {1, 2, 3}, {"threads"});
}

// ZERO-73: ranks that do not all want them are named
TEST(ZeroMasters, MustBeWantedByAllRanks) {
  testing::run_threads_in_gtest({.world_size = 3, .backend = "threads"}, [](const World& world) {
    const auto parameters = mixed_parameters(kLowAndFull);
    ZeroOptions zero{.process_group = world.group()};
    if (world.rank() == 1) zero.master_dtype = at::kFloat;
    ZeroRedundancyOptimizer<SGD> optimizer(parameters, {0.1}, zero);
    set_gradients(parameters, 0);
    expect_error([&] { optimizer.step(); }, {"master_dtype", "rank 1"});
  });
}

// ZERO-73: steps that are left out leave masters alone, and clipped gradients are what is cast
TEST(ZeroMasters, GoWithGradScalerAndClipping) {
  on_ranks(
      [](const World& world) {
        for (const auto& [name, zero] : master_ways(world.group())) {
          const auto parameters = mixed_parameters({at::kBFloat16, at::kFloat});
          MasterReference<AdamW> reference(copies_of(parameters), adamw());
          ZeroRedundancyOptimizer<AdamW> optimizer(parameters, adamw(), zero);
          GradScaler scaler({.device = at::kCPU, .init_scale = 8});
          for (int step = 0; step < 5; ++step) {
            set_gradients(parameters, step);
            set_gradients(reference.parameters(), step);
            scaler.scale(at::ones({}));
            const auto scale = scaler.get_scale();
            for (const auto& each : parameters) each.mutable_grad().mul_(scale);
            if (step == 2) parameters[0].mutable_grad().fill_(std::numeric_limits<float>::infinity());
            scaler.unscale_(optimizer);
            const NormOptions norm{.dtype = at::kDouble};
            if (step != 2) {
              const auto mine = clip_grad_norm_(optimizer, 1.0, norm);
              const auto theirs = clip_grad_norm_(reference.parameters(), 1.0, norm);
              EXPECT_NEAR(mine.item<double>(), theirs.item<double>(), 1e-2 * theirs.item<double>());
              reference.step();
            }
            scaler.step(optimizer);
            scaler.update();
          }
          expect_same(parameters, reference.parameters(), name, {2e-2});
        }
      },
      {1, 2, 3}, {"threads"});
}

// ZERO-73: freezing, unfreezing, groups that are added, closures
TEST(ZeroMasters, GoWithFrozenAddedAndClosures) {
  on_ranks(
      [](const World& world) {
        for (const auto& [name, zero] : master_ways(world.group())) {
          const Warnings quiet;
          auto parameters = mixed_parameters(kLowAndFull);
          parameters[3].requires_grad_(false);
          MasterReference<SGD> reference(copies_of(parameters), SGDOptions(0.1).momentum(0.9));
          ZeroRedundancyOptimizer<SGD> optimizer(parameters, SGDOptions(0.1).momentum(0.9), zero);
          const auto added = mixed_parameters(kLowAndFull, 5);
          MasterReference<SGD> added_reference(copies_of(added), SGDOptions(0.1).momentum(0.9));
          int runs = 0;
          for (int step = 0; step < 6; ++step) {
            if (step == 2) {
              parameters[0].requires_grad_(false);
              parameters[3].requires_grad_(true);
              parameters[0].mutable_grad().reset();
              reference.parameters()[0].mutable_grad().reset();
              reference.parameters()[0].requires_grad_(false);
              reference.parameters()[3].requires_grad_(true);
            }
            if (step == 4) optimizer.add_param_group({added});
            set_gradients(reference.parameters(), step);
            reference.step();
            if (step >= 4) {
              set_gradients(added_reference.parameters(), 90 + step);
              added_reference.step();
            }
            const auto loss = optimizer.step([&] {
              ++runs;
              set_gradients(parameters, step);
              if (step >= 4) set_gradients(added, 90 + step);
              return at::full({}, step);
            });
            EXPECT_EQ(loss.item<int>(), step);
            expect_same(parameters, reference.parameters(), name);
            if (step >= 4) expect_same(added, added_reference.parameters(), name);
          }
          EXPECT_EQ(runs, 6);
        }
      },
      {1, 2, 3}, {"threads"});
}

// ZERO-73: ranks that ran out of inputs step their masters too
TEST(ZeroMasters, StepInJoinScopes) {
  on_ranks(
      [](const World& world) {
        const auto loss_at = [&](auto& ddp, int step) {
          return ddp(ddp_models::random_batch(4, 6, 100 + 10 * step + world.rank())).pow(2).mean();
        };
        DistributedDataParallel plain_ddp(MixedMlp(), small_buckets());
        ZeroRedundancyOptimizer<AdamW> whole(
            plain_ddp.parameters(), adamw(),
            {.stage = ZeroStage::kReplicated, .ddp = plain_ddp, .master_dtype = at::kFloat});
        const auto run = [&](auto& ddp, ZeroOptimizer& optimizer) {
          Join({&ddp, &optimizer}).run([&] {
            for (int step = 0; step < 3 + world.rank(); ++step) {
              optimizer.zero_grad();
              loss_at(ddp, step).backward();
              optimizer.step();
            }
          });
        };
        run(plain_ddp, whole);
        for (const auto stage : {ZeroStage::kState, ZeroStage::kGradients}) {
          DistributedDataParallel ddp(MixedMlp(), small_buckets());
          ZeroRedundancyOptimizer<AdamW> zero(ddp.parameters(), adamw(),
                                              {.stage = stage, .ddp = ddp, .master_dtype = at::kFloat});
          run(ddp, zero);
          expect_same(ddp.parameters(), plain_ddp.parameters(), std::to_string(static_cast<int>(stage)));
        }
      },
      {1, 2, 3}, {"threads"});
}

}  // namespace
}  // namespace lockstep::masters_test
