// When units are gathered, freed and reduced: expected orders as tables, by the events a rank announces.
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>

#include <numeric>

#include "lockstep/fsdp/policies.h"
#include "tests/support/fsdp_models.h"

namespace lockstep::fsdp_prefetch_test {

using namespace fsdp_models;
using ::testing::ElementsAre;
using ::testing::ElementsAreArray;

/// "gather 0", "reduce 2": launches, by the first word of the label and the unit's name.
std::vector<std::string> launches(const testing::Recorder& recorder) {
  std::vector<std::string> found;
  for (const auto& event : recorder.events("launch")) {
    const auto begin = event.unit.find('\'');
    if (begin == std::string::npos) continue;
    const auto name = event.unit.substr(begin + 1, event.unit.rfind('\'') - begin - 1);
    found.push_back((event.kind.starts_with("all_gather") ? "gather " : "reduce ") + name);
  }
  return found;
}

std::size_t most_in_flight(const testing::Recorder& recorder) {
  std::size_t whole = 0;
  std::size_t most = 0;
  for (const auto& event : recorder.events()) {
    if (event.state == "launch" && event.kind.starts_with("all_gather")) most = std::max(most, ++whole);
    if (event.kind == "reshard" && whole > 0) --whole;
  }
  return most;
}

struct Three {
  explicit Three(const World& world, FullyShardOptions options = {}) {
    options.mesh = mesh_of(world);
    model = built_from_seed([] {
      return torch::nn::Sequential(torch::nn::Linear(4, 4), torch::nn::Linear(4, 4), torch::nn::Linear(4, 4));
    });
    for (std::size_t i = 0; i < 3; ++i) fully_shard(*model->ptr(i), options);
    root.emplace(fully_shard(model, options));
  }
  FsdpUnit unit(std::size_t index) { return *unit_of(*model->ptr(index)); }
  void step() { model->forward(at::ones({2, 4}).requires_grad_()).pow(2).mean().backward(); }
  std::vector<std::string> launches_of_step() {
    testing::Recorder recorder;
    step();
    return launches(recorder);
  }
  torch::nn::Sequential model{nullptr};
  std::optional<FsdpUnit> root;
};

struct Expected {
  const char* name;
  FullyShardOptions options;
  std::vector<std::string> first;
  std::vector<std::string> later;
};

// FSDP-35, FSDP-36, FSDP-38, FSDP-44, FSDP-45, TEST-58
TEST(FsdpPrefetch, IsAsTheTableSays) {
  // The last unit of a forward is the first one of its backward, and stays whole in between unless it is told not to.
  const std::vector<std::string> learnt{"gather 0", "gather 1", "gather 2", "gather 1",
                                        "reduce 2", "gather 0", "reduce 1", "reduce 0"};
  const std::vector<std::string> one_by_one{"gather 0", "gather 1", "gather 2", "reduce 2",
                                            "gather 1", "reduce 1", "gather 0", "reduce 0"};
  const std::vector<std::string> kept_whole{"gather 0", "gather 1", "gather 2", "reduce 2", "reduce 1", "reduce 0"};
  const std::vector<std::string> all_at_once{"gather 0", "gather 1", "gather 2", "gather 1",
                                             "gather 0", "reduce 2", "reduce 1", "reduce 0"};
  auto freed = learnt;
  freed.insert(freed.begin() + 3, "gather 2");
  const std::vector<Expected> table{
      {"default", {}, learnt, learnt},
      {"freed", {.reshard_after_forward = true}, learnt, freed},
      {"kept whole", {.reshard_after_forward = false}, kept_whole, kept_whole},
      {"prefetch behind", {.backward_prefetch = BackwardPrefetch::kBackwardPost}, one_by_one, one_by_one},
      {"without prefetch",
       {.forward_prefetch = false, .backward_prefetch = BackwardPrefetch::kNone},
       one_by_one,
       one_by_one},
      {"without limit", {.limit_all_gathers = false}, all_at_once, all_at_once},
  };
  for (const auto& expected : table) {
    testing::run_threads_in_gtest({.world_size = 2}, [&](const World& world) {
      Three three(world, expected.options);
      EXPECT_THAT(three.launches_of_step(), ElementsAreArray(expected.first)) << expected.name;
      EXPECT_THAT(three.launches_of_step(), ElementsAreArray(expected.later)) << expected.name;
      EXPECT_THAT(three.launches_of_step(), ElementsAreArray(expected.later)) << expected.name;
      for (std::size_t i = 0; i < 3; ++i) {
        EXPECT_EQ(three.model->ptr(i)->as<torch::nn::LinearImpl>()->weight.storage().nbytes(), 0u) << expected.name;
      }
    });
  }
}

// FSDP-62, TEST-58
TEST(FsdpPrefetch, OfAccumulationHasNoReductions) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    Three three(world);
    const auto no_sync = three.root->no_sync();
    for (const auto& launch : three.launches_of_step()) EXPECT_TRUE(launch.starts_with("gather")) << launch;
  });
}

// FSDP-26
TEST(FsdpPrefetch, UnitsThatStayWholeAreNotGatheredInAnAccumulation) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    Three three(world, {.reshard_after_forward = false});
    {
      const auto no_sync = three.root->no_sync();
      three.step();
      EXPECT_TRUE(three.launches_of_step().empty());
    }
    EXPECT_THAT(three.launches_of_step(), ElementsAre("reduce 2", "reduce 1", "reduce 0"));
    EXPECT_EQ(three.launches_of_step().size(), 6u);
  });
}

// FSDP-46
TEST(FsdpPrefetch, ListsReplaceThePrefetch) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    Three three(world);
    three.unit(0).set_modules_to_forward_prefetch({three.unit(1), three.unit(2)});
    three.unit(1).set_modules_to_forward_prefetch({});
    three.unit(2).set_modules_to_backward_prefetch({three.unit(1), three.unit(0)});
    const std::vector<std::string> expected{"gather 0", "gather 1", "gather 2", "gather 1",
                                            "gather 0", "reduce 2", "reduce 1", "reduce 0"};
    EXPECT_THAT(three.launches_of_step(), ElementsAreArray(expected));
    Three other(world);
    expect_error([&] { three.unit(0).set_modules_to_forward_prefetch({other.unit(0)}); }, {"under another root"});
  });
}

// FSDP-47
TEST(FsdpPrefetch, OneUnitIsGatheredAheadUnlessThereIsNoLimit) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    for (const bool limits : {true, false}) {
      Three three(world, {.limit_all_gathers = limits});
      three.step();
      testing::Recorder recorder;
      three.step();
      EXPECT_EQ(most_in_flight(recorder), limits ? 2u : 3u);
    }
  });
}

// FSDP-31
TEST(FsdpPrefetch, SettersTradeMemoryForGathers) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    Three three(world);
    three.root->set_reshard_after_backward(false);
    three.step();
    // Still whole, and no step has come; the forward frees them.
    EXPECT_THAT(three.launches_of_step(),
                ElementsAre("gather 1", "gather 2", "gather 1", "reduce 2", "gather 0", "reduce 1", "reduce 0"));
    three.root->set_reshard_after_forward(false);
    EXPECT_THAT(three.launches_of_step(), ElementsAre("reduce 2", "reduce 1", "reduce 0"));
    three.root->set_reshard_after_backward(true);
    three.root->set_reshard_after_forward(true);
    three.step();
    three.unit(1).set_unshard_in_backward(false);
    const auto launches = three.launches_of_step();
    // Not ahead any more, but when it is touched.
    EXPECT_THAT(launches, ElementsAre("gather 0", "gather 1", "gather 2", "gather 2", "reduce 2", "gather 1",
                                      "gather 0", "reduce 1", "reduce 0"));
  });
}

// FSDP-32
TEST(FsdpPrefetch, WhatNobodyWaitedForIsCleanedUp) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    auto model = net();
    auto root = sharded(model, {.mesh = mesh_of(world)});
    const auto head = [&](int step) { return model->blocks[0]->forward(at::ones({2, 7}) * step).pow(2).mean(); };
    unit_of(*model->blocks[2])->unshard(/*async=*/true);
    unit_of(*model->blocks[2])->unshard(/*async=*/true);
    head(1).backward();
    EXPECT_EQ(model->blocks[2]->up->weight.storage().nbytes(), 0u);
    // A unit whose output is not in the loss as well.
    auto lost = model->blocks[1]->forward(at::ones({2, 7}));
    head(2).backward();
    EXPECT_EQ(model->blocks[1]->up->weight.storage().nbytes(), 0u);
    for (const auto& parameter : model->blocks[1]->parameters()) EXPECT_FALSE(parameter.grad().defined());
  });
}

// FSDP-2, FSDP-39, TEST-58
TEST(FsdpPrefetch, AUnitThatIsCalledTwiceIsReducedOnce) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    Three three(world);
    const auto step = [&] {
      testing::Recorder recorder;
      auto* layer = three.model->ptr(0)->as<torch::nn::LinearImpl>();
      layer->forward(layer->forward(at::ones({2, 4}))).pow(2).mean().backward();
      return launches(recorder);
    };
    for (int i = 0; i < 2; ++i) EXPECT_THAT(step(), ElementsAre("gather 0", "reduce 0"));
  });
}

// FSDP-49, FSDP-100
TEST(FsdpPrefetch, ThatDiffersBetweenRanksIsToldByName) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    Three three(world);
    auto* layer = three.model->ptr(world.rank() == 0 ? 0 : 1)->as<torch::nn::LinearImpl>();
    // Same sizes: only the label tells.
    expect_error([&] { layer->forward(at::ones({2, 4})); }, {"unit '0'", "unit '1'"});
  });
}

struct Environment {
  Environment(const char* name, const char* value) : name(name) { ::setenv(name, value, 1); }
  ~Environment() { ::unsetenv(name); }
  const char* name;
};

// FSDP-49
TEST(FsdpPrefetch, DebugModeComparesTheFirstOrderOnAnyBackend) {
  const Environment debug("TORCH_DISTRIBUTED_DEBUG", "INFO");
  testing::run_threads_in_gtest({.world_size = 2, .backend = "gloo"}, [](const World& world) {
    Three three(world);
    auto* layer = three.model->ptr(world.rank() == 0 ? 0 : 1)->as<torch::nn::LinearImpl>();
    expect_error([&] { layer->forward(at::ones({2, 4})); }, {"unit '0'", "unit '1'"});
  });
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    Three three(world);
    const Warnings warnings;
    three.step();
    EXPECT_EQ(warnings.count("another order"), 0);
    // Another order later is told, once, and trains.
    three.model->ptr(2)->as<torch::nn::LinearImpl>()->forward(at::ones({2, 4})).sum().backward();
    EXPECT_EQ(warnings.count("units ran in another order than in the step before"), 1);
    three.step();
    EXPECT_EQ(warnings.count("another order"), 1);
  });
}

// FSDP-40
TEST(FsdpPrefetch, InferenceModeBetweenStepsChangesNothing) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    expect_parity(world, [&](auto& model, SGD& optimizer) {
      for (int step = 0; step < 3; ++step) {
        {
          const c10::InferenceMode inference;
          loss_of(model, world, 10 + step);
        }
        optimizer.zero_grad();
        loss_of(model, world, step).backward();
        optimizer.step();
      }
    });
  });
}

// FSDP-28
TEST(FsdpPrefetch, AHybridStrategyWithoutAMeshShardsWithinHosts) {
  const Environment hosts("LOCAL_WORLD_SIZE", "2");
  testing::run_threads_in_gtest({.world_size = 4}, [](const World& /*world*/) {
    for (const auto strategy : {ShardingStrategy::kHybridShard, ShardingStrategy::kHybridShardZero2}) {
      torch::nn::Sequential model(torch::nn::Linear(4, 4), torch::nn::Linear(4, 4));
      const auto root = shard_by_policy(model, always_wrap_policy(), {.sharding_strategy = strategy});
      EXPECT_EQ(root.options().mesh->shape(), (std::vector<int64_t>{2, 2}));
      EXPECT_EQ(model->parameters()[0].size(0), 2);
    }
    // By hand it is not known which modules there will be.
    expect_error([] { fully_shard(torch::nn::Linear(4, 4), {.sharding_strategy = ShardingStrategy::kHybridShard}); },
                 {"needs a mesh of two named axes"});
  });
}

// FSDP-81
TEST(FsdpPrefetch, WrapMakesUnitsInsideOfItsScope) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    const auto outside = wrap(torch::nn::Linear(4, 4));
    EXPECT_FALSE(unit_of(*outside));
    {
      const EnableWrap scope({.mesh = mesh_of(world), .reshard_after_forward = false});
      const auto inside = wrap(torch::nn::Linear(4, 4));
      EXPECT_EQ(unit_of(*inside)->options().reshard_after_forward, false);
      const auto own = wrap(torch::nn::Linear(4, 4), FullyShardOptions{.mesh = mesh_of(world)});
      EXPECT_FALSE(unit_of(*own)->options().reshard_after_forward);
      expect_error([] { const EnableWrap nested; }, {"inside of another one"});
    }
    EXPECT_FALSE(unit_of(*wrap(torch::nn::Linear(4, 4))));
  });
}

// FSDP-54, FSDP-52
TEST(FsdpPrefetch, BatchNormStaysInFullPrecision) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    torch::nn::Sequential model(torch::nn::Linear(4, 4), torch::nn::BatchNorm1d(4), torch::nn::Linear(4, 2));
    const auto never = [](const PolicyQuestion&) { return PolicyAnswer(false); };
    shard_by_policy(model, never, {.mesh = mesh_of(world), .mp_policy = {.param_dtype = at::kBFloat16}});
    EXPECT_FALSE(unit_of(*model->ptr(0)));
    ASSERT_TRUE(unit_of(*model->ptr(1)));
    const auto output = model->forward(at::randn({8, 4}));
    EXPECT_EQ(output.scalar_type(), at::kBFloat16);
    output.sum().backward();
    const auto* norm = model->ptr(1)->as<torch::nn::BatchNorm1dImpl>();
    EXPECT_EQ(norm->running_mean.scalar_type(), at::kFloat);
    EXPECT_FALSE(norm->running_mean.eq(0).all().item<bool>());  // it was updated, not a copy of it
    EXPECT_EQ(norm->weight.scalar_type(), at::kFloat);
    expect_error([&] { shard_by_policy(model, never, {.mesh = mesh_of(world)}); }, {"is sharded already"});
  });
}

}  // namespace lockstep::fsdp_prefetch_test
