// What a rank's memory holds of a sharded model, as planned and as measured; and ties.
#include <torch/nn/modules/container/sequential.h>

#include "lockstep/fsdp/memory_plan.h"
#include "lockstep/fsdp/state_dict.h"
#include "lockstep/intercept/deferred_init.h"
#include "lockstep/nn/tied_parameters.h"
#include "lockstep/testing/memory_probe.h"
#include "tests/support/fsdp_models.h"

namespace lockstep::fsdp_memory_test {

using namespace fsdp_models;

// FSDP-48, FSDP-98
TEST(FsdpMemory, IsAsPlanned) {
  // One rank: of threads, one may free what another has allocated, and a probe counts those of its own.
  for (const auto& reshard : {std::optional<ReshardAfterForward>(), std::optional<ReshardAfterForward>(true),
                              std::optional<ReshardAfterForward>(false)}) {
    testing::run_threads_in_gtest({.world_size = 1}, [&](const World& world) {
      testing::MemoryProbe probe;
      torch::nn::Sequential model;
      for (int i = 0; i < 4; ++i) model->push_back(torch::nn::Linear(256, 256));
      const FullyShardOptions options{.mesh = mesh_of(world), .reshard_after_forward = reshard, .force_sharding = true};
      for (std::size_t i = 0; i < 4; ++i) fully_shard(*model->ptr(i), options);
      fully_shard(model, options);
      const auto plan = memory_plan(*model);
      EXPECT_NEAR(static_cast<double>(probe.total().current_bytes), static_cast<double>(plan.between_steps),
                  0.05 * static_cast<double>(plan.between_steps));
      for (int step = 0; step < 3; ++step) {
        model->zero_grad();
        probe.reset_peak();
        model->forward(at::ones({1, 256}).requires_grad_()).sum().backward();
      }
      const auto peak = static_cast<double>(probe.total().peak_bytes);
      EXPECT_NEAR(peak, static_cast<double>(plan.peak), 0.05 * peak)
          << plan.to_string() << (reshard ? std::to_string(reshard->ranks()) : "unset");
    });
  }
}

// FSDP-98
TEST(FsdpMemory, IsPlannedWithoutGradientsOfFrozenParameters) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    torch::nn::Linear layer(8, 8);
    layer->weight.set_requires_grad(false);
    fully_shard(layer, {.mesh = mesh_of(world)});
    EXPECT_EQ(memory_plan(*layer).units.back().whole_gradients, 8 * 4);  // the bias
  });
}

// FSDP-22
TEST(FsdpMemory, OfADeferredModelIsItsShardsAndOneUnit) {
  testing::run_threads_in_gtest({.world_size = 4}, [](const World& world) {
    constexpr int64_t kUnit = (256 * 256 + 256) * 4;
    auto model = built_from_seed([] {
      return deferred_init([] {
        torch::nn::Sequential layers;
        for (int i = 0; i < 8; ++i) layers->push_back(torch::nn::Linear(256, 256));
        return layers;
      });
    });
    const testing::MemoryProbe probe;
    for (std::size_t i = 0; i < 8; ++i) fully_shard(*model->ptr(i), {.mesh = mesh_of(world)});
    fully_shard(model, {.mesh = mesh_of(world)});
    // The unit, and its part before it lies in its place.
    probe.expect_peak_at_most(8 * kUnit / 4 + kUnit + kUnit / 4 + kUnit / 10);
  });
}

struct TiedImpl : torch::nn::Module {
  TiedImpl()
      : table(register_module("table", torch::nn::Embedding(6, 4))),
        head(register_module("head", torch::nn::Linear(torch::nn::LinearOptions(4, 6).bias(false)))) {
    tie_parameter(*head, "weight", head->weight, table->weight);
  }
  at::Tensor forward(const at::Tensor& input) { return head->forward(table->forward(input)); }
  torch::nn::Embedding table;
  torch::nn::Linear head;
};
TORCH_MODULE(Tied);

// FSDP-67, FSDP-71
TEST(FsdpMemory, TiedParametersCountOnceInNorms) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    auto model = built_from_seed([] { return Tied(); });
    auto root = fully_shard(model, {.mesh = mesh_of(world)});
    for (auto& shard : unique_parameters(*model)) shard.mutable_grad() = at::ones_like(shard.detach());
    EXPECT_FLOAT_EQ(root.clip_grad_norm_(1e9).item<float>(), std::sqrt(24.0F));
  });
}

// FSDP-67
TEST(FsdpMemory, TiedParametersHaveOneShardAndMoveOnce) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    auto plain = built_from_seed([] { return Tied(); });
    auto model = built_from_seed([] { return Tied(); });
    fully_shard(model, {.mesh = mesh_of(world)});
    EXPECT_EQ(model->parameters().size(), 2u);
    ASSERT_EQ(unique_parameters(*model).size(), 1u);
    EXPECT_TRUE(model->named_parameters()["table.weight"].is_same(model->named_parameters()["head.weight"]));
    const auto input = at::arange(6);
    for (auto* each : {&plain, &model}) {
      SGD optimizer(unique_parameters(**each), SGDOptions(0.1));
      (*each)->forward(input).pow(2).sum().backward();
      optimizer.step();
    }
    const auto state = full_state_dict(*model);
    EXPECT_TRUE(at::allclose(state.at("head.weight"), plain->head->weight));
    EXPECT_TRUE(state.at("table.weight").equal(state.at("head.weight")));
    torch::nn::Linear other(4, 6);
    expect_error([&] { tie_parameter(*other, "weigth", other->weight, plain->table->weight); },
                 {"no parameter 'weigth'"});
    expect_error([&] { tie_parameter(*other, "bias", other->weight, plain->table->weight); }, {"registers as 'bias'"});
    expect_error([&] { tie_parameter(*other, "bias", other->bias, plain->table->weight); }, {"has sizes [6]"});
    torch::nn::Linear turned(6, 4);  // as many elements
    expect_error([&] { tie_parameter(*turned, "weight", turned->weight, plain->table->weight); },
                 {"has sizes [4, 6]", "[6, 4]"});
  });
}

}  // namespace lockstep::fsdp_memory_test
