// What is refused or told before anything trains, and what looks like it and is none.
#include "lockstep/nn/tied_parameters.h"
#include "tests/support/fsdp_models.h"

namespace lockstep::fsdp_refusals_test {

using namespace fsdp_models;

// FSDP-17, FSDP-27, FSDP-30, FSDP-57
TEST(FsdpRefusals, OptionsThatDoNothingAreTold) {
  testing::run_threads_in_gtest({.world_size = 1}, [](const World& world) {
    const Warnings warnings;
    const auto told_with = [&](FullyShardOptions options, const std::string& text) {
      const auto before = warnings.count(text);
      options.mesh = mesh_of(world);
      fully_shard(torch::nn::Linear(4, 4), options);
      return warnings.count(text) - before;
    };
    EXPECT_EQ(told_with({}, "one rank: nothing is divided"), 1);
    EXPECT_EQ(told_with({.force_sharding = true}, "one rank: nothing is divided"), 0);
    EXPECT_EQ(told_with({.sharding_strategy = ShardingStrategy::kNoShard}, "DistributedDataParallel does the same"), 1);
    EXPECT_EQ(told_with({.reshard_after_forward = 1}, "reshard_after_forward = 1 is false"), 1);
    EXPECT_EQ(told_with({.offload_policy = CPUOffloadPolicy()}, "offload_policy has no effect"), 1);
  });
}

// FSDP-18
TEST(FsdpRefusals, AMeshOfThreeAxes) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& /*world*/) {
    const auto mesh = init_device_mesh("cpu", {1, 1, 2}, {.mesh_dim_names = {"pipe", "replicate", "shard"}});
    expect_error([&] { fully_shard(net(), {.mesh = mesh}); }, {"a mesh of 3 axes"});
  });
}

struct TiedPairImpl : torch::nn::Module {
  TiedPairImpl() { tie_parameter(*right, "weight", right->weight, left->weight); }
  torch::nn::Linear left = register_module("left", torch::nn::Linear(4, 4));
  torch::nn::Linear right = register_module("right", torch::nn::Linear(4, 4));
};

// FSDP-33, FSDP-34
TEST(FsdpRefusals, UnitsThatComeTooLateOrShareAParameter) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    const FullyShardOptions options{.mesh = mesh_of(world)};
    auto model = net();
    fully_shard(model->blocks[0], options);
    model->blocks[0]->forward(at::ones({1, 7}));
    expect_error([&] { fully_shard(model, options); }, {"has run before", "before the first forward"});

    const auto tied = std::make_shared<TiedPairImpl>();
    fully_shard(tied->left, options);
    expect_error([&] { fully_shard(tied->right, options); }, {"'weight' is in another unit already"});
  });
}

// FSDP-79
TEST(FsdpRefusals, GradientsOfFlatParametersAreNotSummoned) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    auto model = net();
    auto root = sharded(model, {.mesh = mesh_of(world), .use_orig_params = false});
    expect_error([&] { static_cast<void>(root.summon_full_params({.with_grads = true})); },
                 {"with_grads of a flat parameter", "use_orig_params"});
    const auto summoned = root.summon_full_params();
    EXPECT_EQ(model->head->weight.size(0), 3);
  });
}

// FSDP-23: no late ones.
TEST(FsdpRefusals, ParametersThatAnInnerUnitIgnoresAreNone) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    auto model = net();
    auto& first = model->blocks[0];
    auto& second = model->blocks[1];
    fully_shard(first, {.mesh = mesh_of(world), .ignored_params = {first->up->weight}});
    fully_shard(second, {.mesh = mesh_of(world), .ignored_modules = {second->norm.ptr()}});
    fully_shard(model, {.mesh = mesh_of(world)});
    loss_of(model, world, 0).backward();
    EXPECT_TRUE(first->up->weight.grad().any().item<bool>());
    EXPECT_TRUE(second->norm->weight.grad().any().item<bool>());
  });
}

// FSDP-2, FSDP-34
LOCKSTEP_THREAD_TEST(FsdpRefusals, InnerModulesBehindTheOneAroundThem, 2) {
  auto model = net();
  fully_shard(model, {.mesh = mesh_of(world)});
  expect_error([&] { fully_shard(model->blocks[0], {.mesh = mesh_of(world)}); }, {"Shard inner modules first"});
  auto root = *unit_of(*model);
  std::optional<FsdpNoSync> kept;  // a guard can be handed on
  kept.emplace(root.no_sync());
  kept.reset();
}

}  // namespace lockstep::fsdp_refusals_test
