// Programs that would train differently, or hang, without a word.
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/rnn.h>

#include "tests/support/fsdp_models.h"

namespace lockstep::fsdp_silent_test {

using namespace fsdp_models;

struct MirroredImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& input) { return at::matmul(at::tanh(at::matmul(input, first)), mirror); }
  at::Tensor first = register_parameter("first", at::ones({5, 5}));
  at::Tensor mirror = register_parameter("mirror", first.detach().requires_grad_());
};

// FSDP-12
TEST(FsdpSilent, RefusesParametersThatShareMemory) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    auto model = std::make_shared<MirroredImpl>();
    expect_error([&] { fully_shard(*model, {.mesh = mesh_of(world)}); }, {"'first'", "'mirror'", "share"});
    // In two units as well; but parts of one buffer that do not meet are no sharing.
    torch::nn::Linear left(4, 4);
    torch::nn::Linear right(4, 4);
    right->weight.set_data(left->weight.detach());
    fully_shard(left, {.mesh = mesh_of(world)});
    expect_error([&] { fully_shard(right, {.mesh = mesh_of(world)}); }, {"'weight' and 'weight' share memory"});
    torch::nn::Linear other(4, 4);
    const auto flat = at::zeros({20});
    other->weight.set_data(flat.narrow(0, 0, 16).view({4, 4}));
    other->bias.set_data(flat.narrow(0, 16, 4));
    fully_shard(other, {.mesh = mesh_of(world)});
  });
}

// FSDP-12
TEST(FsdpSilent, RefusesClonesOfShardedModules) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    const auto input = at::ones({2, 4});
    torch::nn::Sequential model(torch::nn::Linear(4, 4), torch::nn::LayerNorm(torch::nn::LayerNormOptions({4})));
    auto before = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(model->clone());
    fully_shard(model, {.mesh = mesh_of(world)});
    auto clone = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(model->clone());
    expect_error([&] { clone->forward(input); }, {"aten::addmm", "cloned", "state dict"});
    before->forward(input);
    torch::nn::GRU recurrent(4, 2);
    fully_shard(recurrent, {.mesh = mesh_of(world)});
    auto other = std::dynamic_pointer_cast<torch::nn::GRUImpl>(recurrent->clone());
    expect_error([&] { other->forward(input.unsqueeze(0)); }, {"aten::gru", "cloned"});
    // Copies for other ends are what they always were.
    auto weight = model->parameters()[0];
    const auto copy = weight.detach().clone();
    EXPECT_EQ(at::matmul(copy, copy.t()).size(0), 2);
    EXPECT_GT(copy.norm().item<double>(), 0);
    model->forward(input).sum().backward();
    weight.set_data(copy);
    model->forward(input).sum().backward();
  });
  testing::run_threads_in_gtest({.world_size = 1}, [](const World& world) {
    torch::nn::Linear model(4, 4);
    fully_shard(model, {.mesh = mesh_of(world)});
    auto clone = std::dynamic_pointer_cast<torch::nn::LinearImpl>(model->clone());
    EXPECT_TRUE(clone->forward(at::ones({2, 4})).equal(model->forward(at::ones({2, 4}))));
  });
}

// FSDP-100
TEST(FsdpSilent, RefusesUnitsThatDifferByRank) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    // Of the same sizes: both would compute with half of each.
    auto left = built_from_seed([] { return torch::nn::Linear(5, 6); });
    auto right = built_from_seed([] { return torch::nn::Linear(5, 6); });
    struct BothImpl : torch::nn::Module {
      BothImpl(const torch::nn::Linear& one, const torch::nn::Linear& other) {
        register_module("left", one);
        register_module("right", other);
      }
    };
    fully_shard(left, {.mesh = mesh_of(world)});
    fully_shard(right, {.mesh = mesh_of(world)});
    fully_shard(*std::make_shared<BothImpl>(left, right), {.mesh = mesh_of(world)});
    expect_error([&] { (world.rank() == 0 ? left : right)->forward(at::ones({1, 5})); },
                 {"FSDP unit 'left'", "FSDP unit 'right'"});
  });
}

// FSDP-66
TEST(FsdpSilent, UnitsThatAreStillWholeFollowFreezing) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    auto model = net();
    sharded(model, {.mesh = mesh_of(world), .reshard_after_forward = false});
    auto weight = model->named_parameters()["block1.up.weight"];
    loss_of(model, world, 0);  // for the log
    weight.set_requires_grad(false);
    loss_of(model, world, 0).backward();
    EXPECT_FALSE(weight.grad().defined());
    loss_of(model, world, 0);
    weight.set_requires_grad(true);
    loss_of(model, world, 0).backward();
    EXPECT_TRUE(weight.grad().defined());
  });
}

// FSDP-5, FSDP-14
TEST(FsdpSilent, ARankWithEmptyShardsSeesThatOthersWereExchanged) {
  testing::run_threads_in_gtest({.world_size = 3}, [](const World& world) {
    torch::nn::Linear layer(4, 2);  // nothing for rank 2
    fully_shard(layer, {.mesh = mesh_of(world), .reshard_after_forward = false});
    layer->forward(at::ones({1, 4}));
    for (const auto& shard : layer->parameters()) shard.set_data(at::full_like(shard.detach(), 3));
    EXPECT_EQ(layer->forward(at::ones({1, 4})).sum().item<double>(), 30);
  });
}

// FSDP-43
TEST(FsdpSilent, WhatOneRankRefusesIsToldToTheOthers) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    auto model = net();
    sharded(model, {.mesh = mesh_of(world)});
    if (world.rank() == 1) model->named_parameters()["block0.up.weight"].set_data(at::ones({3, 7}));
    // expect_error() leaves errors of woken ranks to the harness.
    std::string error;
    try {
      loss_of(model, world, 0);
    } catch (const std::exception& thrown) {
      error = thrown.what();
    }
    EXPECT_THAT(error, ::testing::HasSubstr(world.rank() == 1 ? "'up.weight' is of sizes [3, 7]"
                                                              : "rank 1 left by an exception"));
  });
}

}  // namespace lockstep::fsdp_silent_test
