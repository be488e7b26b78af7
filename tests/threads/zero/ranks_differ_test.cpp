// Ranks that do not do the same: all of them are told, and none waits for the others' timeout.
#include <gmock/gmock.h>
#include <torch/optim/sgd.h>

#include <chrono>
#include <thread>

#include "lockstep/optim/clip_grad.h"
#include "lockstep/testing/temp_dir.h"
#include "lockstep/zero/streaming.h"
#include "tests/support/zero_overlap_fixtures.h"

namespace lockstep::ranks_differ_test {
namespace {

using namespace ddp_models;
using testing::expect_error;
using torch::optim::AdamW;
using zero_fixtures::adamw;
using zero_fixtures::copies_of;
using zero_fixtures::expect_same;
using zero_fixtures::loss_of;
using zero_fixtures::on_ranks;
using zero_fixtures::parameters_of;
using zero_fixtures::set_gradients;
using Zero = ZeroRedundancyOptimizer<AdamW>;

/// Some parameters have equal shapes.
const std::vector<int64_t> kEqualLayers = {6, 8, 8, 8, 3};

// the same shapes in another order
TEST(ZeroRanksDiffer, IsNoticedIfParametersAreListedInAnotherOrder) {
  on_ranks(
      [](const World& world) {
        const bool is_other = world.rank() == world.world_size() - 1;
        for (const auto& [name, zero] : zero_fixtures::ways(world.group())) {
          for (const bool has_same_values : {false, true}) {
            auto parameters = parameters_of({{4, 4}, {4, 4}, {4}, {4}, {4, 4}});
            if (has_same_values) {
              // Only the gradients, which DDP has averaged, tell them apart.
              const at::NoGradGuard no_grad;
              for (auto& parameter : parameters) parameter.fill_(0.5);
            }
            set_gradients(parameters, 1);
            if (is_other) std::swap(parameters[1], parameters[4]);
            const auto before = copies_of(parameters);
            Zero optimizer(parameters, adamw(), zero);
            expect_error([&] { optimizer.step(); }, {"parameter 1 is parameter 4 of rank 0", "in the same order"});
            expect_same(parameters, before, name);
          }
        }
        // With sharded gradients parameters have names.
        DistributedDataParallel ddp(mlp(kEqualLayers), world.group());
        auto parameters = ddp.parameters();
        if (is_other) std::swap(parameters[2], parameters[4]);
        Zero zero(parameters, adamw(), {.stage = ZeroStage::kGradients, .ddp = ddp});
        loss_of(ddp, world, 0).backward();
        expect_error([&] { zero.step(); }, {"parameter 2 is parameter 4 of rank 0"});
      },
      {2, 3}, {"threads", "shm", "gloo"});
}

// large ones are compared by elements from all over them
TEST(ZeroRanksDiffer, IsNoticedInTheLastElementsOfLargeParameters) {
  on_ranks(
      [](const World& world) {
        constexpr int64_t kElements = 4096;
        std::vector<at::Tensor> parameters;
        for (const double last : {1.0, 2.0}) {
          const auto values = at::full({kElements}, 0.5);
          values.slice(0, kElements / 2).fill_(last);
          parameters.push_back(values.requires_grad_());
          parameters.back().mutable_grad() = at::ones({kElements});
        }
        if (world.rank() == 1) std::swap(parameters[0], parameters[1]);
        Zero optimizer(parameters, adamw(), world.group());
        expect_error([&] { optimizer.step(); }, {"parameter 0 is parameter 1 of rank 0", "in the same order"});
      },
      {2}, {"threads"});
}

// models that are not the same before their first step are, as ever, made the same by it
TEST(ZeroRanksDiffer, IsNoErrorIfOnlyValuesDo) {
  on_ranks(
      [](const World& world) {
        for (const auto& [name, zero] : zero_fixtures::ways(world.group())) {
          const auto parameters = parameters_of({{4, 4}, {4, 4}, {4}, {4}}, 10 + world.rank());
          Zero optimizer(parameters, adamw(), zero);
          set_gradients(parameters, 20 + world.rank());
          optimizer.step();
          const auto firsts = copies_of(parameters);
          for (const auto& each : firsts) broadcast(each.detach(), 0, world.group());
          expect_same(parameters, firsts, name);
        }
      },
      {2}, {"threads", "shm"});
}

// U-3: before the first step
TEST(ZeroRanksDiffer, IsNoticedIfStateIsLoadedOnSome) {
  on_ranks(
      [](const World& world) {
        for (const auto& [name, zero] : zero_fixtures::ways(world.group())) {
          const auto parameters = parameters_of({{4, 4}, {7}, {4}});
          const auto saved_of = [&](int steps) {
            const auto others = copies_of(parameters);
            AdamW plain(others, adamw());
            for (int step = 0; step < steps; ++step) {
              set_gradients(others, step);
              plain.step();
            }
            return state_dict_of(plain);
          };
          set_gradients(parameters, 1);
          {
            Zero optimizer(parameters, adamw(), zero);
            if (world.rank() == 0) optimizer.load_state_dict(saved_of(2));
            expect_error([&] { optimizer.step(); }, {"how often state was loaded", "rank 0: '1'"});
          }
          {
            Zero optimizer(parameters, adamw(), zero);
            optimizer.load_state_dict(saved_of(world.rank() == 0 ? 2 : 3));
            expect_error([&] { optimizer.step(); }, {"the state loaded last", "after 3 steps"});
          }
          Zero optimizer(parameters, adamw(), zero);
          optimizer.load_state_dict(saved_of(2));
          optimizer.step();
          optimizer.load_state_dict(saved_of(2));
          optimizer.step();
        }
        // Sharded gradients.
        DistributedDataParallel ddp(mlp(kEqualLayers), world.group());
        const ZeroOptions sharded{.stage = ZeroStage::kGradients, .ddp = ddp};
        AdamW plain(copies_of(ddp.parameters()), adamw());
        set_gradients(plain.param_groups()[0].params(), 1);
        plain.step();
        {
          Zero optimizer(ddp.parameters(), adamw(), sharded);
          loss_of(ddp, world, 0).backward();
          if (world.rank() == 0) optimizer.load_state_dict(state_dict_of(plain));
          expect_error([&] { optimizer.step(); }, {"how often state was loaded", "rank 0: '1'"});
        }
        Zero optimizer(ddp.parameters(), adamw(), sharded);
        loss_of(ddp, world, 0).backward();
        optimizer.load_state_dict(state_dict_of(plain));
        optimizer.step();
      },
      {2, 3}, {"threads", "shm"});
}

/// expect_error() leaves errors of woken ranks to the harness.
std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "none";
}

// U-3: in the middle of a run the others go on, and collectives do not match
TEST(ZeroRanksDiffer, IsNoticedIfStateIsLoadedOnSomeLater) {
  on_ranks(
      [](const World& world) {
        const auto parameters = parameters_of({{4, 4}, {7}, {4}});
        Zero optimizer(parameters, adamw(), world.group());
        set_gradients(parameters, 1);
        optimizer.step();
        optimizer.consolidate_state_dict(0);
        if (world.rank() == 0) optimizer.load_state_dict(OptimizerStateDict(optimizer.state_dict()));
        expect_error([&] { optimizer.step(); }, {"ZeRO's comparison"});
      },
      {2}, {"threads", "shm"});
}

/// Runs `step` after rank 0 alone has loaded state: all learn who, and soon.
void expect_loader_named(const World& world, const std::string& what, const std::function<void()>& step) {
  const auto begin = std::chrono::steady_clock::now();
  const auto error = error_of(step);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10)) << what;
  EXPECT_THAT(error, ::testing::HasSubstr("state was loaded or a group was added on this rank")) << what;
  EXPECT_THAT(error, ::testing::HasSubstr(world.rank() == 0 ? " waits for " : "rank 0 left by an exception")) << what;
}

// (U-3): over a backend that compares nothing
TEST(ZeroRanksDiffer, IsNoticedIfStateIsLoadedOnSomeLaterOverGloo) {
  on_ranks(
      [](const World& world) {
        const auto spare = [&] { return new_group(world.group(), global_ranks(world.group()), {.name = "spare"}); };
        // Small ones and a large one, which are sent by different calls.
        const auto parameters = parameters_of({{4, 4}, {7}, {400, 400}});
        const auto others = copies_of(parameters);
        AdamW plain(others, adamw());
        set_gradients(others, 1);
        plain.step();
        const auto saved = state_dict_of(plain);
        for (std::size_t i = 0; i < zero_fixtures::ways(world.group()).size(); ++i) {
          const auto [name, zero] = zero_fixtures::ways(spare())[i];
          Zero optimizer(parameters, adamw(), zero);
          for (int step = 0; step < 3; ++step) {
            set_gradients(parameters, step);
            optimizer.step();
            // All load, though not at the same time.
            if (step == world.rank()) std::this_thread::sleep_for(std::chrono::milliseconds(300));
            if (step < 2 || world.rank() == 0) optimizer.load_state_dict(saved);
          }
          expect_loader_named(world, name, [&] { optimizer.step(); });
        }
      },
      {2, 3}, {"gloo"});
}

// (U-3): where the step is part of backward
TEST(ZeroRanksDiffer, IsNoticedIfStateIsLoadedOnSomeBetweenBackwards) {
  using namespace zero_overlap_fixtures;
  on_ranks(
      [](const World& world) {
        for (const auto form : {Form::kAfterLast, Form::kInterleaved}) {
          const auto group = new_group(world.group(), global_ranks(world.group()), {.name = "spare"});
          DistributedDataParallel ddp(mlp(kSizes), group, small_buckets());
          zero_overlap_fixtures::Zero zero(ddp.parameters(), sgd(), overlapped(group));
          ddp.register_comm_hook(hook_of(form, ddp, zero));
          for (int step = 0; step < 4; ++step) train_once(ddp, world, step);
          zero.consolidate_state_dict(0);
          if (world.rank() == 0) zero.load_state_dict(OptimizerStateDict(zero.state_dict()));
          expect_loader_named(world, std::to_string(static_cast<int>(form)), [&] { train_once(ddp, world, 4); });
        }
      },
      {2, 3}, {"gloo"});
}

// Z-5: what one rank alone does wrong, the others learn at once
TEST(ZeroRanksDiffer, IsToldToAllIfOneRankThrows) {
  on_ranks(
      [](const World& world) {
        const auto spare = [&] { return new_group(world.group(), global_ranks(world.group()), {.name = "spare"}); };
        const bool is_odd = world.rank() == 1;
        const auto expect_told = [&](const std::function<void()>& action, const std::string& cause) {
          const auto begin = std::chrono::steady_clock::now();
          EXPECT_THAT(error_of(action), ::testing::HasSubstr(is_odd ? cause : "rank 1 left by an exception"));
          EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
        };
        {
          const auto group = spare();
          DistributedDataParallel ddp(mlp(kEqualLayers), group);
          Zero zero(ddp.parameters(), adamw(), {.stage = ZeroStage::kGradients, .ddp = ddp});
          loss_of(ddp, world, 0).backward();
          if (is_odd) ddp.parameters()[0].requires_grad_(false);
          expect_told([&] { zero.step(); }, "frozen");
        }
        {
          const auto parameters = parameters_of({{4, 4}, {7}});
          Zero zero(parameters, adamw(), spare());
          set_gradients(parameters, 1);
          if (is_odd) {
            static_cast<torch::optim::Optimizer&>(zero).add_param_group({{at::eye(2).to_sparse().requires_grad_()}});
          }
          expect_told([&] { zero.step(); }, "must be dense");
        }
        {
          const auto parameters = parameters_of({{4, 4}, {7}});
          Zero zero(parameters, adamw(), spare());
          set_gradients(parameters, 1);
          // No norm is known of this.
          if (is_odd) {
            for (const auto& each : parameters) each.mutable_grad() = at::ones_like(each).to(at::kInt);
          }
          expect_told([&] { clip_grad_norm_(zero, 1); }, "norm");
        }
        {
          // The step that is part of backward is set up in the first one.
          using namespace zero_overlap_fixtures;
          const auto group = spare();
          DistributedDataParallel ddp(mlp(kEqualLayers), group, {.find_unused_parameters = true});
          zero_overlap_fixtures::Zero zero(ddp.parameters(), sgd(), overlapped(group));
          ddp.register_comm_hook(hook_of(Form::kAfterLast, ddp, zero));
          if (is_odd) static_cast<torch::optim::Optimizer&>(zero).add_param_group({{at::ones({2}).requires_grad_()}});
          expect_told([&] { train_once(ddp, world, 0); }, "parameter groups were changed");
          if (is_odd) {
            EXPECT_NE(zero.overlap_info().status, OverlapStatus::kInitialized);
          }
        }
      },
      {2, 3}, {"threads", "shm"});
}

// Z-5: what all do wrong leaves the group as it was
TEST(ZeroRanksDiffer, IsForgottenIfAllThrowAlike) {
  on_ranks(
      [](const World& world) {
        DistributedDataParallel ddp(mlp(kEqualLayers), world.group());
        Zero zero(ddp.parameters(), adamw(), {.stage = ZeroStage::kGradients, .ddp = ddp});
        loss_of(ddp, world, 0).backward();
        const auto first = ddp.parameters()[0];
        for (int i = 0; i < 3; ++i) {
          first.requires_grad_(false);
          expect_error([&] { zero.step(); }, {"frozen"});
          first.requires_grad_(true);
        }
        zero.step();
      },
      {2, 3}, {"threads", "shm", "gloo"});
}

// Z-5: sparse gradients have a norm like others
TEST(ZeroRanksDiffer, IsNoMatterForSparseGradients) {
  on_ranks(
      [](const World& world) {
        const auto parameters = parameters_of({{6, 4}, {7}});
        const auto expected = copies_of(parameters);
        ZeroRedundancyOptimizer<torch::optim::SGD> zero(parameters, {0.1}, world.group());
        torch::optim::SGD plain(expected, 0.1);
        set_gradients(parameters, 1);
        set_gradients(expected, 1);
        const auto indices = at::tensor({1, 4, 1}, at::kLong).unsqueeze(0);
        const auto values = random_batch(3, 4, 5);
        const auto sparse = at::sparse_coo_tensor(indices, values, {6, 4});
        parameters[0].mutable_grad() = sparse;
        expected[0].mutable_grad() = sparse.to_dense();
        const auto norm = clip_grad_norm_(zero, 0.3);
        EXPECT_TRUE(at::allclose(norm, clip_grad_norm_(expected, 0.3)));
        zero.step();
        plain.step();
        expect_same(parameters, expected, "", {1e-6});
      },
      {1, 2, 3}, {"threads"});
}

// Z-8: another optimizer's files are refused by all ranks, whatever they would read of them
TEST(ZeroRanksDiffer, IsNoticedBeforeFilesOfAnotherOptimizerAreRead) {
  const testing::TempDir folder;
  on_ranks(
      [&](const World& world) {
        const auto path = folder.file("state" + std::to_string(world.world_size()));
        // The second rank has no state of it.
        const auto parameters = parameters_of({{40, 4}, {3}});
        ZeroRedundancyOptimizer<torch::optim::SGD> sgd(parameters, torch::optim::SGDOptions(0.1).momentum(0.9),
                                                       world.group());
        set_gradients(parameters, 1);
        parameters[1].mutable_grad().reset();
        sgd.step();
        save_sharded(sgd, path);
        barrier(world.group());
        Zero zero(parameters, adamw().lr(0.7), world.group());
        expect_error([&] { load_sharded(zero, path); }, {"does not fit", "AdamW"});
        EXPECT_EQ(zero.param_groups()[0].options().get_lr(), 0.7);
        zero.step();
        barrier(world.group());
      },
      {1, 2}, {"threads"});
}

// Z-15: state of a run in another precision
TEST(ZeroRanksDiffer, IsNotSoIfStateComesInAnotherDtype) {
  on_ranks(
      [](const World& world) {
        for (const auto& [name, zero] : zero_fixtures::ways(world.group())) {
          const auto parameters = parameters_of({{7, 5}, {5}, {3, 4, 2}});
          const auto expected = copies_of(parameters);
          ZeroRedundancyOptimizer<optim::AdamW> optimizer(parameters, {.lr = 0.02}, zero);
          optim::AdamW plain(expected, {.lr = 0.02});
          set_gradients(expected, 0);
          plain.step();
          auto dict = state_dict_of(plain);
          for (auto& [index, values] : dict.state) {
            for (auto& [key, value] : values) {
              if (value.isTensor()) value = value.toTensor().to(at::kDouble);
            }
          }
          optimizer.load_state_dict(dict);
          {
            const at::NoGradGuard no_grad;
            for (std::size_t i = 0; i < parameters.size(); ++i) parameters[i].copy_(expected[i]);
          }
          zero_fixtures::expect_same_steps(optimizer, plain, parameters, expected, 1, name);
          for (const auto& [key, state] : optimizer.local_optimizer().state()) {
            const auto& adam = static_cast<const torch::optim::AdamWParamState&>(*state);
            EXPECT_EQ(adam.exp_avg().scalar_type(), at::kFloat) << name;
          }
        }
      },
      {1, 2}, {"threads"});
}

// without a group of its own the optimizer, and a hook, take that of the wrapper
TEST(ZeroRanksDiffer, IsRightInSubgroupsThatAreNotNamed) {
  on_ranks(
      [](const World& world) {
        GroupPtr mine;
        for (const auto& ranks : {std::vector<int>{0, 1}, std::vector<int>{2, 3}}) {
          const auto group = new_group(world.group(), ranks);
          if (group) mine = group;
        }
        DistributedDataParallel ddp(mlp(kEqualLayers), mine);
        ddp.register_comm_hook(allreduce_hook());
        Zero zero(ddp.parameters(), adamw());
        EXPECT_EQ(zero.process_group(), mine);
        DistributedDataParallel expected_ddp(mlp(kEqualLayers), mine);
        AdamW plain(expected_ddp.parameters(), adamw());
        for (int step = 0; step < 3; ++step) {
          zero.zero_grad();
          plain.zero_grad();
          // The pairs train on different data, and do not meet.
          const auto batch = random_batch(4, kEqualLayers[0], 10 * step + world.rank());
          ddp(batch).pow(2).mean().backward();
          expected_ddp(batch).pow(2).mean().backward();
          zero.step();
          plain.step();
        }
        expect_same(ddp.parameters(), expected_ddp.parameters(), "", {1e-5});
        const auto alone = mlp(kEqualLayers);
        EXPECT_EQ(Zero(alone->parameters(), adamw()).process_group(), default_group());
      },
      {4}, {"threads"});
}

// of an accumulation that was given up nothing is left, weight decay neither
TEST(ZeroRanksDiffer, IsNotSoAfterAnAbandonedAccumulation) {
  on_ranks(
      [](const World& world) {
        const DdpOptions options{.process_group = world.group(), .find_unused_parameters = true};
        const auto train = [&](auto& ddp, torch::optim::Optimizer& optimizer) {
          const auto batch = my_rows(random_batch(12, 4, 1), world);
          {
            const auto local = ddp.no_sync();
            ddp(batch, true, true).pow(2).mean().backward();
          }
          const auto loss = ddp(batch, false, true).pow(2).mean();
          ddp->zero_grad();
          loss.backward();
          optimizer.step();
          optimizer.zero_grad();
          {
            const auto local = ddp.no_sync();
            ddp(batch, true, true).pow(2).mean().backward();
          }
          optimizer.zero_grad();
          ddp(batch, false, true).pow(2).mean().backward();
          optimizer.step();
        };
        auto single = seeded(Branchy());
        const auto untouched = copies_of(single->left->parameters());
        DistributedDataParallel plain_ddp(seeded(Branchy()), options);
        AdamW plain(plain_ddp.parameters(), adamw());
        train(plain_ddp, plain);
        expect_same(plain_ddp.module()->left->parameters(), untouched, "no decay");
        for (const auto stage : {ZeroStage::kState, ZeroStage::kGradients}) {
          DistributedDataParallel ddp(seeded(Branchy()), options);
          Zero zero(ddp.parameters(), adamw(), {.stage = stage, .ddp = ddp});
          train(ddp, zero);
          expect_same(ddp.parameters(), plain_ddp.parameters(), std::to_string(static_cast<int>(stage)), {1e-5});
        }
      },
      {1, 2}, {"threads"});
}

/// Two layers of equal shapes, whose gradients come in an order of the caller's choice, or not at all.
struct TwinsImpl : torch::nn::Module {
  TwinsImpl()
      : one(register_module("one", torch::nn::Linear(4, 4))),
        other(register_module("other", torch::nn::Linear(4, 4))) {}
  at::Tensor forward(const at::Tensor& input, bool is_swapped, bool uses_other) {
    if (!uses_other) return one->forward(input);
    return is_swapped ? other->forward(input).pow(2) + one->forward(input)
                      : one->forward(input) + other->forward(input).pow(2);
  }
  torch::nn::Linear one;
  torch::nn::Linear other;
};
TORCH_MODULE(Twins);

// DDP without buckets, where gradients come in another order, or not everywhere
TEST(ZeroRanksDiffer, IsNoMatterForTheOrderOfGradients) {
  on_ranks(
      [](const World& world) {
        const auto train = [&](const DdpOptions& options) {
          DistributedDataParallel ddp(seeded(Twins()), options);
          torch::optim::SGD plain(ddp.parameters(), 0.1);
          for (int step = 0; step < 4; ++step) {
            plain.zero_grad();
            const auto batch = my_rows(random_batch(12, 4, step), world);
            const bool uses_other = step < 2 || (step == 2 && world.rank() == 0);
            ddp(batch, world.rank() == 0, uses_other).pow(2).mean().backward();
            plain.step();
          }
          return copies_of(ddp.parameters());
        };
        expect_same(train({.process_group = world.group(), .per_parameter = true}),
                    train({.process_group = world.group(), .find_unused_parameters = true}), "", {1e-6});
      },
      {1, 2, 3}, {"threads", "shm"});
}

// Z-9: a hook that is refused leaves DDP as it was
TEST(ZeroRanksDiffer, IsNotSoAfterARefusedHook) {
  using zero_overlap_fixtures::overlapped;
  using zero_overlap_fixtures::sgd;
  using ZeroSgd = zero_overlap_fixtures::Zero;
  on_ranks(
      [](const World& world) {
        const Warnings quiet;
        const auto train = [&](bool has_refused_hook) {
          DistributedDataParallel ddp(mlp(kEqualLayers), world.group());
          ZeroSgd zero(ddp.parameters(), sgd(), overlapped(world.group()));
          ddp.register_fused_optim([](const std::vector<at::Tensor>& parameters) {
            return std::make_shared<torch::optim::SGD>(parameters, sgd());
          });
          if (has_refused_hook) {
            expect_error([&] { ddp.register_comm_hook(hook_with_zero_step(allreduce_hook(), ddp, zero)); },
                         {"cannot be registered"});
          }
          for (int step = 0; step < 3; ++step) loss_of(ddp, world, step).backward();
          return copies_of(ddp.parameters());
        };
        expect_same(train(true), train(false));
        const auto with_low = [&](bool has_refused_hook) {
          DistributedDataParallel ddp(mlp(kEqualLayers), world.group(),
                                      {.mixed_precision = MixedPrecision{.param_dtype = at::kBFloat16}});
          torch::optim::SGD plain(ddp.parameters(), sgd());
          ZeroSgd zero(ddp.parameters(), sgd(), overlapped(world.group()));
          if (has_refused_hook) {
            expect_error([&] { ddp.register_comm_hook(hook_with_zero_step(allreduce_hook(), ddp, zero)); },
                         {"cannot be registered"});
          }
          for (int step = 0; step < 3; ++step) {
            plain.zero_grad();
            loss_of(ddp, world, step).backward();
            plain.step();
          }
          return copies_of(ddp.parameters());
        };
        expect_same(with_low(true), with_low(false));
      },
      {2}, {"threads"});
}

}  // namespace
}  // namespace lockstep::ranks_differ_test
