// Sharded units train as DDP does, to the last bit, with a part of the memory.
#include <torch/nn/modules/transformer.h>
#include <torch/nn/modules/transformerlayer.h>
#include <torch/version.h>

#include "lockstep/fsdp/fully_shard.h"
#include "lockstep/fsdp/policies.h"
#include "lockstep/fsdp/state_dict.h"
#include "lockstep/intercept/deferred_init.h"
#include "lockstep/optim/clip_grad.h"
#include "lockstep/optim/grad_scaler.h"
#include "lockstep/shard/layout_of.h"
#include "tests/support/fsdp_models.h"

namespace lockstep::fully_shard_test {

using namespace fsdp_models;
using ::testing::HasSubstr;

// FSDP-1, FSDP-2, FSDP-25, FSDP-60, FSDP-97
TEST(FullyShard, TrainsAsDdpDoesToTheLastBit) {
  on_worlds([](const World& world) {
    expect_parity(world, [&](auto& model, SGD& optimizer) {
      for (int step = 0; step < 100; ++step) {
        optimizer.zero_grad();
        loss_of(model, world, step).backward();
        optimizer.step();
      }
    });
  });
}

// FSDP-26, FSDP-29
TEST(FullyShard, MayKeepUnitsWholeUntilBackward) {
  for (const bool reshards : {false, true}) {
    testing::run_threads_in_gtest({.world_size = 2}, [&](const World& world) {
      expect_parity(world,
                    [&](auto& model, SGD& optimizer) {
                      for (int step = 0; step < 3; ++step) {
                        optimizer.zero_grad();
                        loss_of(model, world, step).backward();
                        optimizer.step();
                      }
                    },
                    {.reshard_after_forward = reshards});
    });
  }
}

// FSDP-3, FSDP-4, FSDP-5, FSDP-6, FSDP-15
TEST(FullyShard, CutsRowsAndKeepsNames) {
  testing::run_threads_in_gtest({.world_size = 4}, [](const World& world) {
    auto whole = net();
    auto model = net();
    sharded(model, {.mesh = mesh_of(world)});
    const auto before = whole->named_parameters();
    const auto after = model->named_parameters();
    ASSERT_EQ(after.keys(), before.keys());
    for (const auto& item : after) {
      const auto rows = before[item.key()].size(0);
      const auto chunk = (rows + 3) / 4;
      const auto mine = std::max<int64_t>(0, std::min(chunk, rows - world.rank() * chunk));
      EXPECT_EQ(item.value().size(0), mine) << item.key();
      EXPECT_EQ(item.value().sizes().slice(1), before[item.key()].sizes().slice(1)) << item.key();
    }
    EXPECT_EQ(after["head.weight"].size(0), world.rank() < 3 ? 1 : 0);
    expect_same_parameters(*model, *whole, "before training");
    loss_of(model, world, 0).backward();
    for (const auto& item : model->named_parameters()) {
      ASSERT_TRUE(item.value().grad().defined()) << item.key();
      EXPECT_EQ(item.value().grad().sizes(), item.value().sizes()) << item.key();
    }
    EXPECT_EQ(model->blocks[0]->up->weight.sizes(), at::IntArrayRef({14, 7}));
    EXPECT_EQ(model->blocks[0]->up->weight.storage().nbytes(), 0U);
  });
}

// FSDP-7, FSDP-43
TEST(FullyShard, RefusesRawReadsAndWritesByName) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    auto model = net();
    sharded(model, {.mesh = mesh_of(world)});
    // Releases before 2.13 have words of their own.
    constexpr bool kHasMessages = TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13;
    const auto expect_refused = [&] {
      expect_error([&] { model->head->weight.data_ptr<float>(); },
                   {kHasMessages ? "parameter 'head.weight' is sharded" : "not allocated"});
    };
    expect_refused();
    loss_of(model, world, 0).backward();
    expect_refused();  // freed again
    const at::NoGradGuard no_grad;
    expect_error([&] { model->blocks[1]->up->weight.fill_(1); },
                 {"aten::fill_ writes to parameter 'up.weight'", "summon_full_params"});
    // Its values go when it is freed, so also while it is whole.
    unit_of(*model->blocks[1])->unshard();
    expect_error([&] { model->blocks[1]->up->weight.fill_(1); }, {"aten::fill_ writes to parameter 'up.weight'"});
    EXPECT_EQ(model->head->weight.sum().sizes(), at::IntArrayRef({}));  // a method other than forward
  });
}

// FSDP-8, FSDP-32
TEST(FullyShard, KeepsVersionsWhileMemoryComesAndGoes) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    auto model = net();
    const auto root = sharded(model, {.mesh = mesh_of(world)});
    const auto version = model->head->weight._version();
    const auto loss = loss_of(model, world, 0);
    for (const auto& block : model->blocks) unit_of(*block)->reshard();
    unit_of(*model)->reshard();
    EXPECT_EQ(model->head->weight.storage().nbytes(), 0U);
    loss.backward();
    EXPECT_EQ(model->head->weight._version(), version);
  });
}

// FSDP-12, FSDP-34
TEST(FullyShard, RefusesWhatCannotBeCut) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    const FullyShardOptions options{.mesh = mesh_of(world)};
    struct Odd : torch::nn::Module {};
    const auto with = [](const at::Tensor& parameter) {
      auto module = std::make_shared<Odd>();
      module->register_parameter("odd", parameter);
      return module;
    };
    expect_error([&] { fully_shard(*with(at::ones({})), options); }, {"'odd'", "one-dimensional"});
    expect_error([&] { fully_shard(*with(at::ones({3, 4}).t()), options); }, {"'odd'", "contiguous"});
    expect_error([&] { fully_shard(*with(at::ones({3}).requires_grad_() * 2), options); },
                 {"'odd'", "computed from other tensors"});
    auto mixed = with(at::ones({3}));
    mixed->register_parameter("other", at::ones({3}, at::kDouble));
    expect_error([&] { fully_shard(*mixed, options); }, {"Double: other", "Float: odd"});
    expect_error([&] { fully_shard(*torch::nn::ModuleList(torch::nn::Linear(2, 2)), options); }, {"no forward"});
    auto model = net();
    sharded(model, options);
    expect_error([&] { fully_shard(model, options); }, {"sharded already"});
  });
}

// FSDP-13
TEST(FullyShard, NamesWhatAnOptimizerHoldsFromBefore) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    auto model = net();
    SGD early(model->parameters(), SGDOptions(0.1));
    sharded(model, {.mesh = mesh_of(world)});
    expect_error([&] { check_optimizer(*model, early); }, {"'", "before sharding"});
    SGD late(model->parameters(), SGDOptions(0.1));
    check_optimizer(*model, late);
  });
}

// FSDP-22
TEST(FullyShard, MaterialisesOneUnitAtATime) {
  testing::run_threads_in_gtest({.world_size = 1}, [](const World& world) {
    torch::manual_seed(5);
    auto model = deferred_init([] { return Net(); });
    sharded(model, {.mesh = mesh_of(world)});
    expect_same_parameters(*model, *net(), "deferred");
  });
}

// FSDP-23
TEST(FullyShard, LeavesIgnoredParametersAlone) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    auto model = net();
    const auto ignored = model->head->weight;
    fully_shard(model, {.mesh = mesh_of(world), .ignored_params = {ignored}});
    EXPECT_TRUE(model->named_parameters()["head.weight"].is_same(ignored));
    EXPECT_FALSE(model->named_parameters()["head.bias"].is_same(model->head->bias));
    loss_of(model, world, 0).backward();
    EXPECT_EQ(ignored.grad().sizes(), ignored.sizes());
  });
}

// FSDP-39, FSDP-40, FSDP-62
TEST(FullyShard, AccumulatesEvaluatesAndRepeatsAsDdpDoes) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    const auto train = [&](auto& model, SGD& optimizer) {
      for (int step = 0; step < 4; ++step) {
        optimizer.zero_grad();
        // Two forwards before one backward.
        (loss_of(model, world, step) + loss_of(model, world, step + 50)).backward();
        // A backward that adds to reduced gradients.
        loss_of(model, world, step + 90).backward();
        {
          const at::NoGradGuard no_grad;
          loss_of(model, world, 7);
          loss_of(model, world, 8);
        }
        optimizer.step();
        const at::NoGradGuard no_grad;
        loss_of(model, world, 9);
      }
    };
    // DDP averages the sum of what it has averaged and the new gradients: the same, rounded elsewhere.
    expect_parity(world, train, {}, 1e-5);
  });
}

// FSDP-62
TEST(FullyShard, NoSyncAddsUpWholeGradients) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    DistributedDataParallel ddp(net(), DdpOptions{.process_group = world.group()});
    {
      const auto no_sync = ddp.no_sync();
      loss_of(ddp, world, 0).backward();
    }
    loss_of(ddp, world, 1).backward();
    auto model = net();
    auto root = sharded(model, {.mesh = mesh_of(world)});
    {
      const auto no_sync = root.no_sync();
      loss_of(model, world, 0).backward();
      EXPECT_TRUE(model->parameters()[0].grad().eq(0).all().item<bool>());
    }
    loss_of(model, world, 1).backward();
    const auto expected = ddp.module()->named_parameters();
    for (const auto& item : model->named_parameters()) {
      const auto part = layout_of(item.value())->cut(expected[item.key()].grad());
      EXPECT_TRUE(part.equal(item.value().grad())) << item.key();
    }
    expect_error([&] { static_cast<void>(unit_of(*model->blocks[0])->no_sync()); }, {"for the root"});
  });
}

// FSDP-32: a step or a load is never missed, whatever is still whole.
TEST(FullyShard, SeesWhatWasLoadedOrSteppedWhileWhole) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    auto model = net();
    sharded(model, {.mesh = mesh_of(world), .reshard_after_forward = false});
    const at::NoGradGuard no_grad;
    const auto before = loss_of(model, world, 0);
    for (const auto& parameter : model->parameters()) parameter.data().mul_(2);
    const auto after = loss_of(model, world, 0);
    auto whole = net();
    EXPECT_TRUE(before.equal(loss_of(whole, world, 0)));
    for (const auto& parameter : whole->parameters()) parameter.data().mul_(2);
    EXPECT_TRUE(after.equal(loss_of(whole, world, 0)));
    for (const auto& parameter : model->parameters()) parameter.set_data(parameter.data() / 2);
    EXPECT_TRUE(before.equal(loss_of(model, world, 0)));
  });
}

// FSDP-32
TEST(FullyShard, RefusesChangesBetweenForwardAndBackward) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    auto model = net();
    sharded(model, {.mesh = mesh_of(world)});
    const auto loss = loss_of(model, world, 0);
    for (const auto& parameter : model->parameters()) parameter.data().mul_(2);
    expect_error([&] { loss.backward(); }, {"was changed between forward and backward"});
  });
}

// FSDP-42
TEST(FullyShard, TrainsOnAfterAThrow) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    expect_parity(world, [&](auto& model, SGD& optimizer) {
      for (int step = 0; step < 4; ++step) {
        optimizer.zero_grad();
        if (step == 2) {
          const auto hidden = loss_of(model, world, 70);
          const auto doomed = hidden * at::ones({1}).requires_grad_();
          doomed.register_hook([](const at::Tensor&) { throw std::runtime_error("no"); });
          EXPECT_ANY_THROW(doomed.sum().backward());
          optimizer.zero_grad();
        }
        loss_of(model, world, step).backward();
        optimizer.step();
      }
    });
  });
}

// FSDP-65, FSDP-66
TEST(FullyShard, LeavesUnusedAndFrozenParametersWithoutGradients) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    auto model = net();
    model->blocks[1]->up->weight.set_requires_grad(false);
    for (auto& parameter : model->blocks[0]->parameters()) parameter.set_requires_grad(false);
    sharded(model, {.mesh = mesh_of(world)});
    loss_of(model, world, 0).backward();
    const auto shards = model->named_parameters();
    EXPECT_FALSE(shards["block1.up.weight"].grad().defined());
    EXPECT_TRUE(shards["block1.up.bias"].grad().defined());
    EXPECT_FALSE(shards["block0.up.bias"].grad().defined());
    EXPECT_EQ(model->blocks[0]->up->weight.storage().nbytes(), 0U);
    EXPECT_EQ(model->blocks[1]->up->weight.storage().nbytes(), 0U);
    // Frozen and thawed later, by their shards.
    for (auto& parameter : model->parameters()) parameter.mutable_grad().reset();
    shards["block1.up.weight"].set_requires_grad(true);
    shards["head.weight"].set_requires_grad(false);
    loss_of(model, world, 0).backward();
    EXPECT_TRUE(shards["block1.up.weight"].grad().defined());
    EXPECT_FALSE(shards["head.weight"].grad().defined());
  });
}

// FSDP-61
TEST(FullyShard, DividesByTheFactorGiven) {
  on_worlds([](const World& world) {
    const auto gradients_with = [&](double factor) {
      auto model = net();
      auto root = sharded(model, {.mesh = mesh_of(world)});
      if (factor > 0) root.set_gradient_divide_factor(factor, /*recurse=*/true);
      loss_of(model, world, 0).backward();
      std::vector<at::Tensor> gradients;
      for (const auto& parameter : model->parameters()) gradients.push_back(parameter.grad());
      return gradients;
    };
    const auto mean = gradients_with(0);
    const auto small = gradients_with(16);
    for (std::size_t i = 0; i < mean.size(); ++i) {
      EXPECT_TRUE(at::allclose(mean[i], small[i] * (16 / world.world_size())));
    }
    auto root = sharded(net(), {.mesh = mesh_of(world)});
    for (const double factor : {0, -2}) {
      expect_error([&] { root.set_gradient_divide_factor(factor); }, {"above 0"});
    }
  });
}

// FSDP-71
TEST(FullyShard, ClipsByTheNormOfAllRanks) {
  testing::run_threads_in_gtest({.world_size = 4}, [](const World& world) {
    DistributedDataParallel ddp(net(), DdpOptions{.process_group = world.group()});
    loss_of(ddp, world, 0).backward();
    auto model = net();
    auto root = sharded(model, {.mesh = mesh_of(world)});
    loss_of(model, world, 0).backward();
    for (const double order : {2.0, std::numeric_limits<double>::infinity()}) {
      const auto expected = clip_grad_norm_(ddp.parameters(), 0.01, {.norm_type = order});
      const auto norm = root.clip_grad_norm_(0.01, order);
      EXPECT_TRUE(at::allclose(norm, expected)) << norm << expected;
    }
    const auto whole = ddp.module()->named_parameters();
    for (const auto& item : model->named_parameters()) {
      const auto part = layout_of(item.value())->cut(whole[item.key()].grad());
      EXPECT_TRUE(at::allclose(part, item.value().grad())) << item.key();
    }
  });
}

// FSDP-72
TEST(FullyShard, ScalersOfAllRanksAgreeOnInfinities) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    auto model = net();
    sharded(model, {.mesh = mesh_of(world)});
    SGD optimizer(model->parameters(), SGDOptions(0.1));
    GradScaler scaler({.device = at::kCPU, .init_scale = 4});
    scaler.scale(loss_of(model, world, 0)).backward();
    // In the part of one rank only.
    if (world.rank() == 1) model->parameters()[0].grad().fill_(std::numeric_limits<float>::infinity());
    const auto before = model->parameters()[1].detach().clone();
    scaler.step(optimizer);
    scaler.update();
    EXPECT_TRUE(model->parameters()[1].detach().equal(before));
    EXPECT_EQ(scaler.get_scale(), 2);
  });
}

// FSDP-79
TEST(FullyShard, SummonsWholeParameters) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    auto whole = net();
    auto model = net();
    auto root = sharded(model, {.mesh = mesh_of(world)});
    const at::NoGradGuard no_grad;
    {
      const auto summoned = root.summon_full_params();
      EXPECT_TRUE(model->head->weight.equal(whole->head->weight));
      EXPECT_TRUE(model->blocks[2]->up->weight.equal(whole->blocks[2]->up->weight));
      model->head->weight.fill_(3);
      expect_error([&] { static_cast<void>(root.summon_full_params()); }, {"inside of another one"});
    }
    EXPECT_TRUE(model->named_parameters()["head.weight"].eq(3).all().item<bool>());
    {
      const auto summoned = root.summon_full_params({.writeback = false});
      model->head->weight.fill_(5);
    }
    EXPECT_TRUE(model->named_parameters()["head.weight"].eq(3).all().item<bool>());
  });
}

// FSDP-18, FSDP-28
TEST(FullyShard, ReplicatesAcrossTheFirstAxisOfAMesh) {
  testing::run_threads_in_gtest({.world_size = 4}, [](const World& world) {
    const auto mesh = init_device_mesh("cpu", {2, 2}, {.mesh_dim_names = {"replicate", "shard"}});
    DistributedDataParallel ddp(net(), DdpOptions{.process_group = world.group()});
    loss_of(ddp, world, 0).backward();
    auto model = net();
    sharded(model, {.mesh = mesh});
    loss_of(model, world, 0).backward();
    const auto whole = ddp.module()->named_parameters();
    for (const auto& item : model->named_parameters()) {
      const auto part = layout_of(item.value())->cut(whole[item.key()].grad());
      EXPECT_TRUE(at::allclose(part, item.value().grad(), 1e-5, 1e-7)) << item.key();
    }
    const auto unnamed = init_device_mesh("cpu", {2, 2});
    expect_error([&] { fully_shard(net(), {.mesh = unnamed}); }, {"needs names"});
  });
}

// FSDP-50, FSDP-51
TEST(FullyShard, GathersAndReducesInLowPrecision) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    auto model = built_from_seed([] { return std::make_shared<torch::nn::LinearImpl>(6, 5); });
    const auto values = model->weight.detach().clone();
    fully_shard(*model,
                {.mesh = mesh_of(world), .mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}});
    EXPECT_EQ(model->parameters()[0].scalar_type(), at::kFloat);
    const auto output = model->forward(at::ones({2, 6}, at::kBFloat16));
    EXPECT_EQ(output.scalar_type(), at::kBFloat16);
    output.sum().backward();
    EXPECT_EQ(model->parameters()[0].grad().scalar_type(), at::kFloat);
    EXPECT_TRUE(model->parameters()[0].grad().eq(2).all().item<bool>());
    EXPECT_TRUE(layout_of(model->parameters()[0])->cut(values).equal(model->parameters()[0].detach()));
  });
}

// FSDP-86
TEST(FullyShard, IsRefusedByThoseWhoDivideOrAverageThemselves) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    auto model = net();
    sharded(model, {.mesh = mesh_of(world)});
    expect_error([&] { DistributedDataParallel(model, DdpOptions{.process_group = world.group()}); },
                 {"'table.weight' is a shard", "leave DistributedDataParallel out"});
    expect_error(
        [&] {
          ZeroRedundancyOptimizer<torch::optim::SGD>(model->parameters(), SGDOptions(0.1),
                                                     {.process_group = world.group()});
        },
        {"is a shard already", "ordinary optimizer"});
  });
}

// FSDP-1
TEST(FullyShard, TakesLibtorchsTransformer) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    const auto build = [] {
      return torch::nn::TransformerEncoder(torch::nn::TransformerEncoderOptions(
          torch::nn::TransformerEncoderLayerOptions(8, 2).dim_feedforward(12).dropout(0.0), 2));
    };
    const auto input = at::randn({3, 2, 8}, at::detail::createCPUGenerator(world.rank()), at::TensorOptions());
    DistributedDataParallel ddp(built_from_seed(build), DdpOptions{.process_group = world.group()});
    ddp->forward(input).pow(2).mean().backward();
    auto model = built_from_seed(build);
    for (const auto& layer : *model->layers) fully_shard(*layer, {.mesh = mesh_of(world)});
    fully_shard(model, {.mesh = mesh_of(world)});
    model->forward(input).pow(2).mean().backward();
    const auto whole = ddp.module()->named_parameters();
    for (const auto& item : model->named_parameters()) {
      const auto part = layout_of(item.value())->cut(whole[item.key()].grad());
      EXPECT_TRUE(part.equal(item.value().grad())) << item.key();
    }
  });
}

// FSDP-75, FSDP-76
TEST(FullyShard, SavesAndLoadsWholeState) {
  testing::run_threads_in_gtest({.world_size = 4}, [](const World& world) {
    auto whole = net();
    auto model = net();
    sharded(model, {.mesh = mesh_of(world)});
    const auto state = full_state_dict(*model);
    const auto expected = whole->named_parameters();
    ASSERT_EQ(state.size(), expected.size());
    for (const auto& item : expected) EXPECT_TRUE(state.at(item.key()).equal(item.value())) << item.key();
    EXPECT_EQ(full_state_dict(*model, {.rank0_only = true}).empty(), world.rank() != 0);

    const at::NoGradGuard no_grad;
    for (const auto from_rank0 : {false, true}) {
      for (const auto& parameter : model->parameters()) parameter.zero_();
      const bool is_given = !from_rank0 || world.rank() == 0;
      load_full_state_dict(*model, is_given ? state : ModuleState(), {.broadcast_from_rank0 = from_rank0});
      expect_same_parameters(*model, *whole, "loaded");
      EXPECT_TRUE(loss_of(model, world, 0).equal(loss_of(whole, world, 0)));
      // Nothing is changed by what does not fit.
      auto other = state;
      other["head.bias"] = at::zeros({4});
      expect_error([&] { load_full_state_dict(*model, other, {.broadcast_from_rank0 = from_rank0}); },
                   {"'head.bias' has sizes [4] there and [3] in the module"});
      other.erase("head.bias");
      expect_error([&] { load_full_state_dict(*model, other, {.broadcast_from_rank0 = from_rank0}); },
                   {"it lacks head.bias"});
      auto more = state;
      more["more"] = at::ones({1});
      expect_error([&] { load_full_state_dict(*model, more, {.broadcast_from_rank0 = from_rank0}); },
                   {"the module has no more"});
      other["more"] = at::ones({1});
      load_full_state_dict(*model, other, {.strict = false, .broadcast_from_rank0 = from_rank0});
      expect_same_parameters(*model, *whole, "loaded in part");
    }
  });
}

// FSDP-15, FSDP-80, FSDP-82
TEST(FullyShard, PoliciesPickUnits) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    const FullyShardOptions options{.mesh = mesh_of(world)};
    auto by_type = net();
    const auto root = shard_by_policy(by_type, module_wrap_policy<BlockImpl>(), options);
    EXPECT_TRUE(unit_of(*by_type->blocks[1]));
    EXPECT_FALSE(unit_of(*by_type->head));
    EXPECT_EQ(root.parameter_names(), (std::vector<std::string>{"table.weight", "head.weight", "head.bias"}));
    auto all = net();
    EXPECT_TRUE(shard_by_policy(all, always_wrap_policy(), options).parameter_names().empty());
    EXPECT_EQ(unit_of(*all->blocks[0]->up)->name(), "block0.up");
    auto by_size = net();
    shard_by_policy(by_size, size_based_wrap_policy(200), options);
    EXPECT_TRUE(unit_of(*by_size->blocks[0]));
    EXPECT_FALSE(unit_of(*by_size->blocks[0]->up));
    auto by_name = net();
    shard_by_policy(
        by_name,
        [&](const PolicyQuestion& question) {
          if (question.name != "head") return PolicyAnswer(false);
          auto own = options;
          own.reshard_after_forward = false;
          return PolicyAnswer(own);
        },
        options);
    EXPECT_EQ(unit_of(*by_name->head)->options().reshard_after_forward, false);
    for (auto* model : {&by_type, &all, &by_size, &by_name}) {
      EXPECT_TRUE(loss_of(*model, world, 0).equal(loss_of(by_type, world, 0)));
      loss_of(*model, world, 0).backward();
      EXPECT_TRUE((*model)->parameters()[0].grad().defined());
    }
  });
}

}  // namespace lockstep::fully_shard_test
