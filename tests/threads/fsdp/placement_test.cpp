// How parameters are cut and gathered: dims, meshes, flat parameters, several modules, strategies, other dtypes.
#include <torch/nn/modules/container/sequential.h>

#include "lockstep/intercept/deferred_init.h"
#include "tests/support/fsdp_models.h"

namespace lockstep::fsdp_placement_test {

using namespace fsdp_models;
using ::testing::ElementsAre;

void train(auto& model, SGD& optimizer, const World& world, int steps = 3) {
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    loss_of(model, world, step).backward();
    optimizer.step();
  }
}

std::shared_ptr<torch::nn::SequentialImpl> unseeded_square() {
  return torch::nn::Sequential(torch::nn::Linear(8, 4), torch::nn::Tanh(), torch::nn::Linear(4, 8)).ptr();
}

std::shared_ptr<torch::nn::SequentialImpl> square() {
  return built_from_seed([] { return unseeded_square(); });
}

at::Tensor input_of(const World& world, int step, int64_t width = 8) {
  const auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(10 * step + world.rank()));
  return at::randn({3, width}, generator, at::TensorOptions());
}

/// Trains a sequential model of any input with DDP; returns it.
std::shared_ptr<torch::nn::SequentialImpl> trained_by_ddp(const World& world, int steps) {
  auto ddp = DistributedDataParallel(torch::nn::Sequential(square()), DdpOptions{.process_group = world.group()});
  SGD optimizer(ddp.parameters(), SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    ddp->forward(input_of(world, step)).pow(2).mean().backward();
    optimizer.step();
  }
  return ddp.module().ptr();
}

void train(torch::nn::SequentialImpl& model, const World& world, int steps) {
  SGD optimizer(model.parameters(), SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    model.forward(input_of(world, step)).pow(2).mean().backward();
    optimizer.step();
  }
}

// FSDP-9
TEST(FsdpPlacement, CutsAnyDimThatDividesEvenly) {
  on_worlds([](const World& world) {
    const auto expected = trained_by_ddp(world, 3);
    auto model = square();
    const auto second_dim = [](const std::string&, const at::Tensor& parameter) -> std::optional<ShardPlacement> {
      if (parameter.dim() < 2) return std::nullopt;
      return ShardPlacement{.dim = -1};
    };
    fully_shard(*model->ptr(0), {.mesh = mesh_of(world), .shard_placement_fn = second_dim});
    fully_shard(*model, {.mesh = mesh_of(world), .shard_placement_fn = second_dim});
    EXPECT_EQ(model->parameters()[0].sizes(), at::IntArrayRef({4, 8 / world.world_size()}));
    train(*model, world, 3);
    expect_same_parameters(*model, *expected, "cut along dim 1");
  });
  testing::run_threads_in_gtest({.world_size = 3}, [](const World& world) {
    const auto dim = [](int64_t dim) {
      return [dim](const std::string&, const at::Tensor&) { return std::optional(ShardPlacement{.dim = dim}); };
    };
    expect_error([&] { fully_shard(*square(), {.mesh = mesh_of(world), .shard_placement_fn = dim(1)}); },
                 {"'0.weight' of sizes [4, 8]", "dim 1 does not divide evenly by 3 ranks"});
    for (const int64_t none : {-3, 2}) {
      expect_error([&] { fully_shard(*square(), {.mesh = mesh_of(world), .shard_placement_fn = dim(none)}); },
                   {"'0.weight'", "no dim " + std::to_string(none)});
    }
  });
}

// FSDP-10
TEST(FsdpPlacement, HoldsParametersOfTwoMeshes) {
  testing::run_threads_in_gtest({.world_size = 4}, [](const World& world) {
    const auto mesh = init_device_mesh("cpu", {2, 2}, {.mesh_dim_names = {"outer", "inner"}});
    const auto whole = mesh_of(world);
    auto model = square();
    // The second layer is of the inner axis only: its gradients are averaged there.
    const auto place = [&](const std::string& name, const at::Tensor&) -> std::optional<ShardPlacement> {
      if (!name.starts_with("2.")) return std::nullopt;
      return ShardPlacement{.dim = 0, .mesh = mesh["inner"]};
    };
    auto unit = fully_shard(*model, {.mesh = whole, .shard_placement_fn = place});
    EXPECT_EQ(model->named_parameters()["2.weight"].size(0), 4);
    EXPECT_EQ(model->named_parameters()["0.weight"].size(0), 1);
    model->forward(input_of(world, 0)).pow(2).mean().backward();

    std::vector<at::Tensor> all;
    auto plain = square();
    plain->forward(input_of(world, 0)).pow(2).mean().backward();
    for (const auto& item : plain->named_parameters()) {
      const auto group = item.key().starts_with("2.") ? mesh["inner"].get_group() : world.group();
      auto grad = item.value().grad() / group->getSize();
      all_reduce(grad, group);
      const auto shard = model->named_parameters()[item.key()];
      EXPECT_TRUE(at::allclose(layout_of(shard)->cut(grad), shard.grad(), 1e-5, 1e-7)) << item.key();
    }
    expect_error([&] { unit.set_custom_all_gather(std::make_shared<AllGatherComm>()); }, {"several meshes"});
    expect_error([&] { unit.set_all_reduce_hook([](const at::Tensor&) {}); }, {"several meshes"});
    const auto same_group = [&](const std::string&, const at::Tensor&) {
      return std::optional(
          ShardPlacement{.mesh = DeviceMesh::from_group(world.group(), "cpu", {.mesh_dim_names = {"x"}})});
    };
    expect_error([&] { fully_shard(*square(), {.mesh = whole, .shard_placement_fn = same_group}); },
                 {"'0.weight'", "the unit's own group"});
  });
}

// FSDP-11, FSDP-33
TEST(FsdpPlacement, SeveralModulesMakeOneUnit) {
  on_worlds([](const World& world) {
    const auto expected = [&] {
      DistributedDataParallel ddp(net(), DdpOptions{.process_group = world.group()});
      SGD optimizer(ddp.parameters(), SGDOptions(0.1).momentum(0.9));
      train(ddp, optimizer, world);
      return ddp.module();
    }();
    auto model = net();
    const FullyShardOptions options{.mesh = mesh_of(world)};
    // The first and the last block: between them others run, and the unit is gathered anew.
    const auto pair = fully_shard({model->blocks[0].ptr(), model->blocks[2].ptr()}, options);
    EXPECT_EQ(pair.parameter_names().size(), 12u);
    EXPECT_TRUE(unit_of(*model->blocks[0]) && unit_of(*model->blocks[2]));
    expect_error([&] { model->blocks[0]->forward(at::ones({1, 7})); }, {"several modules", "needs a root"});
    fully_shard(model, options);
    SGD optimizer(model->parameters(), SGDOptions(0.1).momentum(0.9));
    train(model, optimizer, world);
    expect_same_parameters(*model, *expected, "two blocks in a unit");
  });
}

// FSDP-16
TEST(FsdpPlacement, FlatParametersTrainAsTheirPartsDo) {
  on_worlds([](const World& world) {
    const auto expected = trained_by_ddp(world, 3);
    auto model = square();
    const FullyShardOptions options{.mesh = mesh_of(world), .use_orig_params = false};
    fully_shard(*model->ptr(2), options);
    auto root = fully_shard(*model, options);
    std::vector<std::string> names;
    for (const auto& item : model->named_parameters()) names.push_back(item.key());
    EXPECT_THAT(names, ElementsAre("_flat_param", "2._flat_param"));
    EXPECT_EQ(model->parameters()[0].numel(), (36 + world.world_size() - 1) / world.world_size());
    EXPECT_THAT(root.parameter_names(), ElementsAre("0.weight", "0.bias"));
    train(*model, world, 3);
    const auto guard = root.summon_full_params();
    const auto* first = model->ptr(0)->as<torch::nn::LinearImpl>();
    const auto* second = model->ptr(2)->as<torch::nn::LinearImpl>();
    const auto whole = expected->named_parameters();
    EXPECT_TRUE(first->weight.equal(whole["0.weight"]));
    EXPECT_TRUE(first->bias.equal(whole["0.bias"]));
    EXPECT_TRUE(second->weight.equal(whole["2.weight"]));
    EXPECT_TRUE(second->bias.equal(whole["2.bias"]));
  });
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    auto model = square();
    model->parameters()[1].set_requires_grad(false);
    expect_error([&] { fully_shard(*model, {.mesh = mesh_of(world), .use_orig_params = false}); },
                 {"frozen: 0.bias", "trainable: 0.weight, 2.weight, 2.bias"});
  });
}

// FSDP-12, FSDP-16
TEST(FsdpPlacement, NamesBothSetsOfMixedDtypes) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    auto model = square();
    model->ptr(2)->to(at::kDouble);
    for (const bool use_orig_params : {true, false}) {
      expect_error([&] { fully_shard(*model, {.mesh = mesh_of(world), .use_orig_params = use_orig_params}); },
                   {"Double", "2.weight, 2.bias", "Float", "0.weight, 0.bias", "unit of their own"});
    }
  });
}

// FSDP-14
TEST(FsdpPlacement, FollowsShardsThatAreCastOrExchanged) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    auto plain = net();
    auto model = net();
    const auto root = sharded(model, {.mesh = mesh_of(world)});
    loss_of(model, world, 0).backward();
    DistributedDataParallel ddp(plain, DdpOptions{.process_group = world.group()});
    loss_of(ddp, world, 0).backward();
    for (auto* module : {static_cast<torch::nn::Module*>(model.get()), static_cast<torch::nn::Module*>(plain.get())}) {
      module->to(at::kDouble);
      module->zero_grad();
    }
    DistributedDataParallel again(plain, DdpOptions{.process_group = world.group()});
    SGD optimizer(model->parameters(), SGDOptions(0.1).momentum(0.9));
    SGD reference(again.parameters(), SGDOptions(0.1).momentum(0.9));
    train(model, optimizer, world);
    train(again, reference, world);
    EXPECT_EQ(model->head->weight.scalar_type(), at::kDouble);
    expect_same_parameters(*model, *plain, "in double precision");
    // Some of a unit cannot go elsewhere alone.
    model->head->to(at::kFloat);
    expect_error([&] { loss_of(model, world, 0); }, {"the shard of parameter 'head.", "Move all parameters of a unit"});
  });
}

// FSDP-17
TEST(FsdpPlacement, OneRankGathersNothingUnlessForced) {
  testing::run_threads_in_gtest({.world_size = 1}, [](const World& world) {
    for (const bool force : {false, true}) {
      auto model = net();
      sharded(model, {.mesh = mesh_of(world), .force_sharding = force});
      testing::Recorder recorder;
      loss_of(model, world, 0).backward();
      std::size_t gathers = 0;
      for (const auto& event : recorder.events("launch")) gathers += event.kind.starts_with("all_gather") ? 1 : 0;
      EXPECT_EQ(gathers > 0, force);
    }
  });
}

// FSDP-27, FSDP-28
TEST(FsdpPlacement, StrategiesTrainAsDdpDoes) {
  testing::run_threads_in_gtest({.world_size = 4}, [](const World& world) {
    const auto expected = trained_by_ddp(world, 3);
    const auto hybrid = init_device_mesh("cpu", {2, 2}, {.mesh_dim_names = {"replicate", "shard"}});
    for (const auto strategy :
         {ShardingStrategy::kFullShard, ShardingStrategy::kShardGradOp, ShardingStrategy::kNoShard,
          ShardingStrategy::kHybridShard, ShardingStrategy::kHybridShardZero2}) {
      const bool is_hybrid = strategy >= ShardingStrategy::kHybridShard;
      auto model = square();
      const FullyShardOptions options{.mesh = is_hybrid ? hybrid : mesh_of(world), .sharding_strategy = strategy};
      fully_shard(*model->ptr(0), options);
      fully_shard(*model, options);
      train(*model, world, 3);
      expect_same_parameters(*model, *expected, "strategy", is_hybrid ? 1e-5 : 0);
      const auto rows = model->parameters()[0].size(0);
      EXPECT_EQ(rows, strategy == ShardingStrategy::kNoShard ? 4 : is_hybrid ? 2 : 1);
    }
    expect_error(
        [&] { fully_shard(*square(), {.mesh = mesh_of(world), .sharding_strategy = ShardingStrategy::kHybridShard}); },
        {"needs a mesh of two named axes"});
    expect_error(
        [&] {
          fully_shard(*square(), {.mesh = mesh_of(world),
                                  .reshard_after_forward = true,
                                  .sharding_strategy = ShardingStrategy::kFullShard});
        },
        {"give one of them"});
  });
}

// FSDP-30
TEST(FsdpPlacement, KeepsPartsAmongNeighboursUntilBackward) {
  testing::run_threads_in_gtest({.world_size = 4}, [](const World& world) {
    const auto expected = [&] {
      DistributedDataParallel ddp(net(), DdpOptions{.process_group = world.group()});
      SGD optimizer(ddp.parameters(), SGDOptions(0.1).momentum(0.9));
      train(ddp, optimizer, world);
      return ddp.module();
    }();
    auto model = net();
    sharded(model, {.mesh = mesh_of(world), .reshard_after_forward = 2});
    SGD optimizer(model->parameters(), SGDOptions(0.1).momentum(0.9));
    testing::Recorder recorder;
    train(model, optimizer, world);
    std::size_t of_two = 0;
    for (const auto& event : recorder.events("launch")) {
      of_two += event.kind.starts_with("all_gather") && event.group_size == 2 ? 1 : 0;
    }
    EXPECT_GT(of_two, 0u);
    expect_same_parameters(*model, *expected, "kept by two");
    {
      const at::NoGradGuard no_grad;  // and evaluation in between
      loss_of(model, world, 9);
    }
    expect_error([&] { fully_shard(net(), {.mesh = mesh_of(world), .reshard_after_forward = 3}); },
                 {"3 does not divide the 4 ranks"});
  });
}

// FSDP-99
TEST(FsdpPlacement, NeighboursMayKeepPartsUntilGradientsAreReduced) {
  testing::run_threads_in_gtest({.world_size = 4}, [](const World& world) {
    const auto accumulate = [&](auto& model, const auto& no_sync, int step) {
      {
        const auto scope = no_sync();
        for (int micro = 0; micro < 2; ++micro) loss_of(model, world, 10 * step + micro).backward();
      }
      loss_of(model, world, 10 * step + 2).backward();
    };
    DistributedDataParallel ddp(net(), DdpOptions{.process_group = world.group()});
    SGD plain(ddp.parameters(), SGDOptions(0.1).momentum(0.9));
    auto model = net();
    auto root = sharded(model, {.mesh = mesh_of(world), .reshard_after_forward = 2, .keep_parts = true});
    SGD optimizer(model->parameters(), SGDOptions(0.1).momentum(0.9));
    const auto gathers = [](const testing::Recorder& recorder, int size) {
      const auto events = recorder.events("launch");
      return std::count_if(events.begin(), events.end(), [&](const auto& event) {
        return event.kind.starts_with("all_gather") && event.group_size == size;
      });
    };
    for (int step = 0; step < 3; ++step) {
      plain.zero_grad();
      accumulate(ddp, [&] { return ddp.no_sync(); }, step);
      plain.step();
      optimizer.zero_grad();
      {
        testing::Recorder recorder;
        accumulate(model, [&] { return root.no_sync(); }, step);
        EXPECT_EQ(gathers(recorder, 4), step == 0 ? 4 : 0) << "one for each unit, unless an evaluation has done it";
        EXPECT_GE(gathers(recorder, 2), 4 * 3);
      }
      optimizer.step();
      const at::NoGradGuard no_grad;
      {
        testing::Recorder recorder;
        EXPECT_TRUE(model->forward(batch(world, 7)).allclose(ddp->forward(batch(world, 7)), 1e-5, 1e-6));
        EXPECT_EQ(gathers(recorder, 4), 4) << "after a step";
      }
      {
        testing::Recorder recorder;
        model->forward(batch(world, 8));
        EXPECT_EQ(gathers(recorder, 4), 0) << "since the last one";
      }
      // What is written between forwards is seen.
      if (step == 1) {
        for (const auto& parameter : ddp.parameters()) parameter.data().mul_(1.5);
        for (const auto& parameter : model->parameters()) parameter.data().mul_(1.5);
        EXPECT_TRUE(model->forward(batch(world, 7)).allclose(ddp->forward(batch(world, 7)), 1e-5, 1e-6));
      }
    }
    expect_same_parameters(*model, *ddp.module(), "kept by two", 1e-5);
    expect_error([&] { fully_shard(net(), {.mesh = mesh_of(world), .keep_parts = true}); }, {"how many neighbours"});
  });
}

// FSDP-23
TEST(FsdpPlacement, LeavesIgnoredModulesAlone) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    auto model = net();
    fully_shard(model, {.mesh = mesh_of(world), .ignored_modules = {model->blocks[1].ptr()}});
    for (const auto& item : model->named_parameters()) {
      EXPECT_EQ(layout_of(item.value()) == nullptr, item.key().starts_with("block1.")) << item.key();
    }
    loss_of(model, world, 0).backward();
    auto plain = net();
    loss_of(plain, world, 0).backward();
    // Its own gradient, of this rank's data alone.
    EXPECT_TRUE(model->blocks[1]->up->weight.grad().allclose(plain->blocks[1]->up->weight.grad()));
    expect_error(
        [&] {
          fully_shard(
              net(),
              {.mesh = mesh_of(world), .ignored_params = {model->head->bias}, .ignored_modules = {model->head.ptr()}});
        },
        {"both ignored_params and ignored_modules"});
    expect_error([&] { fully_shard(net(), {.mesh = mesh_of(world), .ignored_modules = {model.ptr()}}); },
                 {"to be ignored and sharded already"});
  });
}

struct WithBuffersImpl : torch::nn::Module {
  explicit WithBuffersImpl(double value)
      : layer(register_module("layer", torch::nn::Linear(4, 4))),
        scale(register_buffer("scale", at::full({3}, value))),
        count(register_buffer("count", at::full({1}, static_cast<int64_t>(value), at::kLong))) {
    at::NoGradGuard no_grad;
    layer->weight.fill_(value);
  }
  torch::nn::Linear layer;
  at::Tensor scale;
  at::Tensor count;
};
TORCH_MODULE(WithBuffers);

// FSDP-20, FSDP-24
TEST(FsdpPlacement, SendsRankZerosStatesFirst) {
  testing::run_threads_in_gtest({.world_size = 4}, [](const World& world) {
    const auto hybrid = init_device_mesh("cpu", {2, 2}, {.mesh_dim_names = {"replicate", "shard"}});
    for (const auto& mesh : {mesh_of(world), hybrid}) {
      WithBuffers model(world.rank() + 3);
      auto root = fully_shard(model, {.mesh = mesh, .sync_module_states = true});
      EXPECT_TRUE(model->scale.eq(3).all().item<bool>());
      EXPECT_EQ(model->count.item<int64_t>(), 3);
      const auto guard = root.summon_full_params();
      EXPECT_TRUE(model->layer->weight.eq(3).all().item<bool>());
    }
  });
}

// FSDP-24, FSDP-53
TEST(FsdpPlacement, CastsFloatingBuffersOnly) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    WithBuffers model(1);
    fully_shard(model, {.mesh = mesh_of(world), .mp_policy = {.buffer_dtype = at::kBFloat16}});
    EXPECT_EQ(model->scale.scalar_type(), at::kBFloat16);
    EXPECT_EQ(model->count.scalar_type(), at::kLong);
    EXPECT_EQ(model->named_buffers()["scale"].scalar_type(), at::kBFloat16);
  });
}

struct OnMetaImpl : torch::nn::Module {
  OnMetaImpl() : weight(register_parameter("weight", at::ones({5}, at::kMeta))) {}
  at::Tensor weight;
};

// FSDP-21
TEST(FsdpPlacement, FillsWhatHasNoMemory) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    std::vector<std::string> filled;
    const auto fill = [&](torch::nn::Module& module) {
      filled.push_back(module.name());
      const at::NoGradGuard no_grad;
      for (const auto& parameter : module.parameters(false)) parameter.fill_(2);
    };
    const auto on_meta = std::make_shared<OnMetaImpl>();
    auto root = fully_shard(*on_meta, {.mesh = mesh_of(world), .param_init_fn = fill});
    EXPECT_EQ((on_meta->weight * 3).sum().item<double>(), 30);
    // Built without memory: each module of its own, not those that are units already.
    const auto deferred = built_from_seed([] { return deferred_init([] { return unseeded_square(); }); });
    fully_shard(*deferred->ptr(0), {.mesh = mesh_of(world)});
    filled.clear();
    const auto unit = fully_shard(*deferred, {.mesh = mesh_of(world), .param_init_fn = fill});
    EXPECT_EQ(filled.size(), 1u);
    EXPECT_TRUE(deferred->parameters()[2].eq(2).all().item<bool>());
    EXPECT_FALSE(deferred->parameters()[0].eq(2).any().item<bool>());
    expect_error([&] { fully_shard(*std::make_shared<OnMetaImpl>(), {.mesh = mesh_of(world)}); },
                 {"OnMetaImpl", "give a param_init_fn"});
  });
}

// FSDP-19
TEST(FsdpPlacement, RefusesADeviceThatIsNotTheMeshs) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    expect_error([&] { fully_shard(net(), {.mesh = mesh_of(world), .device_id = at::Device("cuda:0")}); },
                 {"device_id is cuda:0", "cpu"});
    auto model = net();
    fully_shard(model, {.mesh = mesh_of(world), .device_id = at::Device(at::kCPU)});
    loss_of(model, world, 0).backward();
  });
}

}  // namespace lockstep::fsdp_placement_test
