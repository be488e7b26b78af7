// Reductions at their edges: padding, memory of the program's, when hooks run, what a reset forgets, who gets zeros.
#include "tests/support/fsdp_models.h"

namespace lockstep::fsdp_reductions_test {

using namespace fsdp_models;
using ::testing::ElementsAre;

DeviceMesh two_by_two() {
  return init_device_mesh("cpu", {2, 2}, {.mesh_dim_names = {"replicate", "shard"}});
}

/// Gives out memory that is not zero, and keeps what is to be reduced.
struct DirtyReduce : ReduceScatterComm {
  at::Tensor allocate(int64_t elements, const at::TensorOptions& options, const GroupPtr& /*group*/) override {
    ++allocations;
    return at::full({elements}, std::numeric_limits<double>::quiet_NaN(), options);
  }
  Pending run(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
              const GroupPtr& group) override {
    for (const auto& input : inputs) seen.push_back(input.clone());
    return ReduceScatterComm::run(outputs, inputs, group);
  }
  std::vector<at::Tensor> seen;
  int allocations = 0;
};

// FSDP-4, FSDP-70
TEST(FsdpReductions, PadWithZerosInMemoryOfTheProgram) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    torch::nn::Linear layer(5, 3);
    auto unit = fully_shard(layer, {.mesh = mesh_of(world)});
    const auto reduce = std::make_shared<DirtyReduce>();
    unit.set_custom_reduce_scatter(reduce);
    at::Tensor reduced;
    unit.set_all_reduce_hook([&](const at::Tensor& gradients) { reduced = gradients.clone(); });
    layer->forward(at::full({1, 5}, 2.0)).sum().backward();
    // Two rows of the weight and two elements of the bias for each rank, of three.
    ASSERT_EQ(reduce->seen.size(), 2u);
    EXPECT_TRUE(reduce->seen[0].equal(at::cat({at::ones({15}), at::zeros({5})})));
    EXPECT_TRUE(reduce->seen[1].equal(at::cat({at::full({3}, 0.5), at::zeros({1})})));
    EXPECT_EQ(reduce->allocations, 1);
    const auto rows = world.rank() == 0 ? 2 : 1;
    const auto padded = [&](int64_t width, double value) {
      return at::cat({at::full({rows * width}, value), at::zeros({(2 - rows) * width})});
    };
    EXPECT_TRUE(reduced.equal(at::cat({padded(5, 2), padded(1, 1)})));
  });
}

// FSDP-56, FSDP-69: also in float16, whose division has two parts.
TEST(FsdpReductions, HooksSeeTheSumOverReplicas) {
  testing::run_threads_in_gtest({.world_size = 4}, [](const World& world) {
    for (const auto dtype : {at::kFloat, at::kHalf}) {
      torch::nn::Linear layer(torch::nn::LinearOptions(4, 4).bias(false));
      auto unit = fully_shard(layer, {.mesh = two_by_two(), .mp_policy = {.param_dtype = dtype}});
      std::vector<double> seen;
      unit.set_all_reduce_hook([&](const at::Tensor& gradients) { seen.push_back(gradients[0].item<double>()); });
      layer->forward(at::full({1, 4}, world.rank() + 1.0)).sum().backward();
      EXPECT_THAT(seen, ElementsAre(2.5));
      EXPECT_TRUE(layer->parameters()[0].grad().eq(2.5).all().item<bool>());
    }
  });
}

// FSDP-64, FSDP-70
TEST(FsdpReductions, StayOnTheirWayAsManyAsMayBe) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    Pair pair(world);
    int finished = 0;
    pair.root.set_all_reduce_hook([&](const at::Tensor&) { ++finished; });
    for (auto& block : pair.model->blocks) unit_of(*block)->set_all_reduce_hook([&](const at::Tensor&) { ++finished; });
    pair.root.set_max_reductions_in_flight(8);
    pair.root.set_is_last_backward(false);
    loss_of(pair.model, world, 0).backward();
    EXPECT_EQ(finished, 0);
    pair.root.set_is_last_backward(true);
    loss_of(pair.model, world, 1).backward();
    EXPECT_EQ(finished, 8);
    loss_of(pair.ddp, world, 0).backward();
    loss_of(pair.ddp, world, 1).backward();
    expect_same_gradients(*pair.model, *pair.ddp.module(), "of two backwards", 1e-6);
  });
}

// FSDP-42, FSDP-60, FSDP-62
TEST(FsdpReductions, AResetForgetsGradientsAndWeightsThatWereSetAside) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    Pair pair(world);
    {
      const auto no_sync = pair.root.no_sync();
      pair.root.backward(loss_of(pair.model, world, 0), 3 + world.rank());
    }
    pair.root.reset_iter_state();
    // An optimizer with decay or momentum would step with zeros.
    for (const auto& shard : pair.model->parameters()) EXPECT_FALSE(shard.grad().defined());
    const auto accumulate = [&](auto& model, auto& scopes) {
      {
        const auto no_sync = scopes.no_sync();
        loss_of(model, world, 1).backward();
      }
      loss_of(model, world, 2).backward();
    };
    accumulate(pair.model, pair.root);
    accumulate(pair.ddp, pair.ddp);
    expect_same_gradients(*pair.model, *pair.ddp.module(), "after a reset");
  });
}

// FSDP-42, FSDP-63
TEST(FsdpReductions, AResetForgetsPartialSums) {
  testing::run_threads_in_gtest({.world_size = 4}, [](const World& world) {
    Pair pair(world, {.mesh = two_by_two()});
    pair.root.set_requires_all_reduce(false);
    loss_of(pair.model, world, 0).backward();
    pair.root.reset_iter_state();
    pair.root.set_requires_all_reduce(true);
    loss_of(pair.model, world, 1).backward();
    loss_of(pair.ddp, world, 1).backward();
    expect_same_gradients(*pair.model, *pair.ddp.module(), "after a reset", 1e-6);
  });
}

// FSDP-62: a new tensor in .grad is as good as a zeroed one.
TEST(FsdpReductions, AGradientThatIsExchangedDropsWhatWasSetAside) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    Pair pair(world);
    {
      const auto no_sync = pair.root.no_sync();
      loss_of(pair.model, world, 0).backward();
    }
    for (auto& shard : pair.model->parameters()) shard.mutable_grad() = at::zeros_like(shard.detach());
    loss_of(pair.model, world, 1).backward();
    loss_of(pair.ddp, world, 1).backward();
    expect_same_gradients(*pair.model, *pair.ddp.module(), "exchanged");
  });
}

// FSDP-40, FSDP-65, FSDP-66
TEST(FsdpReductions, ZerosAreOfTrainableParametersOfUnitsThatTrain) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    auto model = net();
    model->blocks[1]->up->weight.set_requires_grad(false);
    auto root = sharded(model, {.mesh = mesh_of(world)});
    root.set_reduce_scatter_unused_params(true);
    {
      const at::NoGradGuard no_grad;
      model->blocks[2]->forward(at::ones({2, 7}));
    }
    // Of the first one only a part, by one rank.
    auto hidden = model->blocks[1]->forward(at::ones({2, 7}));
    if (world.rank() == 0) hidden = model->blocks[0]->up->forward(hidden);
    if (world.rank() == 1) hidden = model->blocks[0]->norm->forward(hidden);
    hidden.sum().backward();
    for (const auto& item : model->named_parameters()) {
      const bool is_used = item.key().starts_with("block0.") || item.key().starts_with("block1.");
      EXPECT_EQ(item.value().grad().defined(), is_used && item.key() != "block1.up.weight") << item.key();
    }
  });
}

// FSDP-68
TEST(FsdpReductions, OfGradientsOfDifferentDtypesAreRefused) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    torch::nn::Linear layer(4, 4);
    auto unit = fully_shard(layer, {.mesh = mesh_of(world)});
    layer->bias.mutable_grad() = at::zeros({4}, at::kDouble);
    expect_error([&] { layer->forward(at::ones({1, 4})).sum().backward(); },
                 {"'weight' and 'bias'", "different dtypes: Float and Double", "a unit of its own"});
    unit.reset_iter_state();
    layer->forward(at::ones({1, 4})).sum().backward();
    EXPECT_TRUE(layer->parameters()[1].grad().eq(1).all().item<bool>());
  });
}

// FSDP-41: also where gradients are set aside.
TEST(FsdpReductions, OfGradientsOfGradientsAreRefusedUnderNoSync) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    Pair pair(world);
    {
      const auto no_sync = pair.root.no_sync();
      expect_error([&] { loss_of(pair.model, world, 0).backward({}, /*retain_graph=*/true, /*create_graph=*/true); },
                   {"create_graph", "DistributedDataParallel"});
    }
    pair.root.reset_iter_state();
    loss_of(pair.model, world, 1).backward();
    loss_of(pair.ddp, world, 1).backward();
    expect_same_gradients(*pair.model, *pair.ddp.module(), "afterwards");
  });
}

struct TwoMeshesImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& input) { return at::matmul(at::matmul(input, all), expert); }
  at::Tensor all = register_parameter("all", at::ones({4, 4}));
  at::Tensor expert = register_parameter("expert", at::ones({4, 4}));
};

// FSDP-10
TEST(FsdpReductions, OfTwoMeshesRunInTheReverseOfTheirGathers) {
  testing::run_threads_in_gtest({.world_size = 4}, [](const World& world) {
    const auto mesh = two_by_two();
    auto model = std::make_shared<TwoMeshesImpl>();
    const auto place = [&](const std::string& name, const at::Tensor&) {
      return name == "expert" ? std::optional(ShardPlacement{.mesh = mesh["shard"]}) : std::nullopt;
    };
    fully_shard(*model, {.mesh = mesh_of(world), .shard_placement_fn = place});
    const testing::Recorder recorder;
    model->forward(at::ones({1, 4})).sum().backward();
    std::vector<std::string> calls;
    for (const auto& event : recorder.events("launch")) {
      calls.push_back(event.kind.substr(0, event.kind.find('_')) + " of " + std::to_string(event.group_size));
    }
    EXPECT_THAT(calls, ElementsAre("all of 4", "all of 2", "reduce of 2", "reduce of 4"));
  });
}

struct MixedImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& input) { return at::matmul(input, weight) * scale.to(at::kFloat); }
  at::Tensor weight = register_parameter("weight", at::ones({4, 4}));
  at::Tensor scale = register_parameter("scale", at::full({4}, 2, at::kDouble), /*requires_grad=*/false);
};

// FSDP-10, FSDP-70: two groups of parameters, and one mesh.
TEST(FsdpReductions, CanBeReplacedInAUnitOfTwoDtypes) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    auto model = std::make_shared<MixedImpl>();
    auto unit = fully_shard(*model, {.mesh = mesh_of(world)});
    const auto reduce = std::make_shared<DirtyReduce>();
    unit.set_custom_reduce_scatter(reduce);
    unit.set_custom_all_gather(std::make_shared<AllGatherComm>());
    unit.set_all_reduce_hook([](const at::Tensor& gradients) { gradients.mul_(3); });
    model->forward(at::ones({1, 4})).sum().backward();
    EXPECT_EQ(reduce->seen.size(), 1u);
    EXPECT_TRUE(model->parameters()[0].grad().eq(6).all().item<bool>());
  });
}

}  // namespace lockstep::fsdp_reductions_test
