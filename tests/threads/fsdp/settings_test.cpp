// What a unit's options and setters do to the others and to memory: strategies, parts of neighbours, early gathers,
// precision, policies.
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/instancenorm.h>

#include "lockstep/fsdp/policies.h"
#include "tests/support/fsdp_models.h"

namespace lockstep::fsdp_settings_test {

using namespace fsdp_models;
using ::testing::ElementsAre;
using ::testing::UnorderedElementsAre;

/// Launches of gathers, of one unit or of all.
std::size_t gathers(const testing::Recorder& recorder, const std::string& unit = "") {
  std::size_t count = 0;
  for (const auto& event : recorder.events("launch")) {
    const bool is_meant = unit.empty() || event.unit.find("'" + unit + "'") != std::string::npos;
    count += event.kind.starts_with("all_gather") && is_meant ? 1 : 0;
  }
  return count;
}

// FSDP-28
TEST(FsdpSettings, HybridShardZero2KeepsUnitsWholeUntilBackward) {
  testing::run_threads_in_gtest({.world_size = 4}, [](const World& world) {
    const auto mesh = init_device_mesh("cpu", {2, 2}, {.mesh_dim_names = {"replicate", "shard"}});
    for (const auto strategy : {ShardingStrategy::kHybridShard, ShardingStrategy::kHybridShardZero2}) {
      auto model = net();
      sharded(model, {.mesh = mesh, .sharding_strategy = strategy});
      const auto loss = loss_of(model, world, 0);
      const testing::Recorder recorder;
      loss.backward();
      EXPECT_EQ(gathers(recorder) > 0, strategy == ShardingStrategy::kHybridShard);
    }
  });
}

struct WatchedGather : AllGatherComm {
  Pending run(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
              const GroupPtr& group) override {
    groups.emplace_back(group->getSize(), group->getRank());
    return AllGatherComm::run(outputs, inputs, group);
  }
  std::vector<std::pair<int, int>> groups;  // ranks, and this one's place
};

// FSDP-30
TEST(FsdpSettings, PartsUntilBackwardAreAmongNeighboursUnlessTheyAreAll) {
  testing::run_threads_in_gtest({.world_size = 4}, [](const World& world) {
    auto model = net();
    sharded(model, {.mesh = mesh_of(world), .reshard_after_forward = 2});
    const auto gather = std::make_shared<WatchedGather>();
    unit_of(*model->blocks[1])->set_custom_all_gather(gather);
    loss_of(model, world, 0).backward();
    EXPECT_THAT(gather->groups, ElementsAre(std::pair(4, world.rank()), std::pair(2, world.rank() % 2)));
    // A part for each of the ranks that shard is what a shard is.
    const auto all = fully_shard(torch::nn::Linear(4, 4), {.mesh = mesh_of(world), .reshard_after_forward = 4});
    EXPECT_EQ(all.options().reshard_after_forward, true);
  });
}

// FSDP-31, FSDP-61
TEST(FsdpSettings, WithoutRecurseAreOfOneUnit) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    Pair pair(world);
    pair.root.set_gradient_divide_factor(8);
    loss_of(pair.model, world, 0).backward();
    loss_of(pair.ddp, world, 0).backward();
    auto plain = pair.ddp.module();
    for (auto& weight : {plain->table->weight, plain->head->weight, plain->head->bias})
      weight.mutable_grad().mul_(0.25);
    expect_same_gradients(*pair.model, *plain, "the root's by eight", 1e-6);

    pair.model->zero_grad();
    pair.root.set_requires_gradient_sync(false, /*recurse=*/false);
    loss_of(pair.model, world, 0).backward();
    for (const auto& item : pair.model->named_parameters()) {
      EXPECT_EQ(item.value().grad().any().item<bool>(), item.key().starts_with("block")) << item.key();
    }
  });
}

// FSDP-32
TEST(FsdpSettings, AnEarlyGatherIsLaunchedOnce) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    auto model = net();
    sharded(model, {.mesh = mesh_of(world)});
    auto unit = *unit_of(*model->blocks[0]);
    const testing::Recorder recorder;
    unit.unshard(/*async=*/true);
    unit.unshard(/*async=*/true);
    unit.unshard();
    model->blocks[0]->forward(at::ones({2, 7}));
    EXPECT_EQ(gathers(recorder), 1u);
  });
}

// FSDP-25
TEST(FsdpSettings, AUnitIsFreedWhenItsGradientsAreThere) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    auto model = net();
    sharded(model, {.mesh = mesh_of(world)});
    for (int step = 0; step < 2; ++step) {
      auto hidden = model->table->forward(batch(world, step));
      int checks = 0;
      for (std::size_t i = 0; i < 3; ++i) {
        // Before backward touches the unit that gave it.
        hidden.register_hook([&, i](const at::Tensor&) {
          EXPECT_EQ(model->blocks[i]->up->weight.storage().nbytes(), 0u) << i;
          ++checks;
        });
        hidden = model->blocks[i]->forward(hidden);
      }
      model->head->forward(hidden).sum().backward();
      EXPECT_EQ(checks, 3);
    }
  });
}

// FSDP-66
TEST(FsdpSettings, AUnitStaysWholeForItsFrozenParametersBehindItsGradients) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    auto model = net();
    for (auto& parameter : model->blocks[1]->up->parameters()) parameter.set_requires_grad(false);
    for (auto& parameter : model->blocks[1]->norm->parameters()) parameter.set_requires_grad(false);
    sharded(model, {.mesh = mesh_of(world)});
    for (int step = 0; step < 2; ++step) {
      const auto loss = loss_of(model, world, step);
      const testing::Recorder recorder;
      loss.backward();
      EXPECT_EQ(gathers(recorder, "block1"), 1u);
      EXPECT_EQ(model->blocks[1]->up->weight.storage().nbytes(), 0u);
    }
  });
}

struct PickingImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& input) { return input.index_select(1, order) * weight; }
  at::Tensor weight = register_parameter("weight", at::full({4}, 0.5));
  at::Tensor order = register_parameter("order", at::arange(3, -1, -1), /*requires_grad=*/false);
};

// FSDP-50
TEST(FsdpSettings, LowPrecisionIsOfFloatingPointParameters) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    auto model = std::make_shared<PickingImpl>();
    fully_shard(*model, {.mesh = mesh_of(world), .mp_policy = {.param_dtype = at::kBFloat16}});
    const auto output = model->forward(at::arange(4, at::kFloat).view({1, 4}));
    EXPECT_EQ(output.scalar_type(), at::kBFloat16);
    EXPECT_EQ(model->order.scalar_type(), at::kLong);
    EXPECT_TRUE(output.to(at::kFloat).equal(at::arange(3, -1, -1).view({1, 4}) * 0.5));
    output.sum().backward();
    EXPECT_TRUE(model->parameters()[0].grad().defined());
  });
}

// FSDP-51
TEST(FsdpSettings, ReduceDtypeHoldsWithoutParamDtype) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    const auto gradient = [&](const MixedPrecisionPolicy& policy) {
      torch::nn::Linear layer(torch::nn::LinearOptions(4, 4).bias(false));
      fully_shard(layer, {.mesh = mesh_of(world), .mp_policy = policy});
      const auto output = layer->forward(at::full({1, 4}, 257.0));
      EXPECT_EQ(output.scalar_type(), at::kFloat);
      output.sum().backward();
      return layer->parameters()[0].grad()[0][0];
    };
    EXPECT_EQ(gradient({}).item<double>(), 257);
    const auto low = gradient({.reduce_dtype = at::kBFloat16});
    EXPECT_EQ(low.scalar_type(), at::kFloat);
    EXPECT_EQ(low.item<double>(), 256);
    EXPECT_EQ(gradient({.reduce_dtype = at::kBFloat16, .keep_low_precision_grads = true}).scalar_type(), at::kBFloat16);
  });
}

// FSDP-52, FSDP-54
TEST(FsdpSettings, RunningStatisticsAreUpdatedThoughOperandsAreCast) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    torch::nn::InstanceNorm1d norm(torch::nn::InstanceNorm1dOptions(4).affine(true).track_running_stats(true));
    fully_shard(norm, {.mesh = mesh_of(world), .mp_policy = {.param_dtype = at::kBFloat16}});
    EXPECT_EQ(norm->forward(at::full({2, 4, 3}, 5.0)).scalar_type(), at::kBFloat16);
    EXPECT_EQ(norm->running_mean.scalar_type(), at::kFloat);
    EXPECT_TRUE(norm->running_mean.eq(0.5).all().item<bool>());  // a tenth
  });
}

struct SpreadImpl : torch::nn::Module {
  std::tuple<at::Tensor, at::Tensor> forward() { return at::var_mean(weight, /*unbiased=*/false); }
  at::Tensor weight = register_parameter("weight", at::arange(4, at::kFloat));
};

// FSDP-52
TEST(FsdpSettings, OutputDtypeHoldsForAllResults) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    auto model = std::make_shared<SpreadImpl>();
    fully_shard(*model,
                {.mesh = mesh_of(world), .mp_policy = {.param_dtype = at::kBFloat16, .output_dtype = at::kFloat}});
    const auto [variance, mean] = model->forward();
    EXPECT_EQ(variance.scalar_type(), at::kFloat);
    EXPECT_EQ(mean.scalar_type(), at::kFloat);
    EXPECT_EQ(mean.item<double>(), 1.5);
  });
}

// FSDP-54
TEST(FsdpSettings, ModulesThatNeedFullPrecisionAreThoseThePolicyNames) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    torch::nn::LayerNorm norm(torch::nn::LayerNormOptions({4}));
    torch::nn::Sequential model(torch::nn::Linear(4, 4), norm, torch::nn::BatchNorm1d(4));
    FullyShardOptions options{.mesh = mesh_of(world), .mp_policy = {.param_dtype = at::kBFloat16}};
    options.mp_policy.is_full_precision_module = [](const torch::nn::Module& module) {
      return dynamic_cast<const torch::nn::LayerNormImpl*>(&module) != nullptr;
    };
    shard_by_policy(model, [](const PolicyQuestion&) { return PolicyAnswer(false); }, options);
    ASSERT_TRUE(unit_of(*norm));
    EXPECT_FALSE(unit_of(*model->ptr(2)));
    // It computes in float32, and the module behind it gets what it would get from others.
    EXPECT_EQ(norm->forward(at::randn({3, 4})).scalar_type(), at::kBFloat16);
    EXPECT_EQ(norm->weight.scalar_type(), at::kFloat);
  });
}

struct CollectionImpl : torch::nn::Module {
  CollectionImpl() {
    register_module("layers", torch::nn::ModuleList(torch::nn::Linear(4, 4), torch::nn::Linear(4, 4)));
    const auto shared = register_module("shared", torch::nn::Linear(4, 4));
    register_module("again", shared);
    ignored = register_module("ignored", Block(4));
  }
  Block ignored{nullptr};
};

// FSDP-80, FSDP-82, FSDP-23
TEST(FsdpSettings, PoliciesAreAskedOnceForModulesThatCanBeCalled) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    auto model = std::make_shared<CollectionImpl>();
    std::vector<std::string> asked;
    const auto all = [&](const PolicyQuestion& question) {
      asked.push_back(question.name);
      return PolicyAnswer(true);
    };
    shard_by_policy(*model, all, {.mesh = mesh_of(world), .ignored_modules = {model->ignored.ptr()}});
    EXPECT_THAT(asked, UnorderedElementsAre("layers.0", "layers.1", "shared"));
    for (const auto& parameter : model->ignored->parameters()) EXPECT_FALSE(layout_of(parameter));
  });
}

struct AttentiveImpl : torch::nn::Module {
  torch::nn::MultiheadAttention attention = register_module("attention", torch::nn::MultiheadAttention(8, 2));
};

// FSDP-80, FSDP-82
TEST(FsdpSettings, TheSizePolicyLeavesAttentionWholeAndCountsEachElementOnce) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    const FullyShardOptions options{.mesh = mesh_of(world)};
    const auto build = [] { return std::make_shared<AttentiveImpl>(); };
    auto plain = built_from_seed(build);
    auto model = built_from_seed(build);
    shard_by_policy(*model, size_based_wrap_policy(10), options);
    EXPECT_TRUE(unit_of(*model->attention));
    EXPECT_FALSE(unit_of(*model->attention->out_proj));
    const auto input = at::ones({3, 2, 8});
    const auto run = [&](auto& each) { return std::get<0>(each->attention->forward(input, input, input)); };
    EXPECT_TRUE(at::allclose(run(model), run(plain), 1e-5, 1e-6));

    // A block's layers are large enough, and leave too little for the block itself.
    auto layers = net();
    shard_by_policy(layers, size_based_wrap_policy(100), options);
    EXPECT_TRUE(unit_of(*layers->blocks[0]->up));
    EXPECT_TRUE(unit_of(*layers->blocks[0]->down));
    EXPECT_FALSE(unit_of(*layers->blocks[0]));
  });
}

}  // namespace lockstep::fsdp_settings_test
