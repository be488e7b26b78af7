// Parameters and state where simple cases do not reach: third dims, parts without gradients, buffers without memory,
// views in files, second names, scopes with something on its way.
#include <torch/optim/adamw.h>

#include <filesystem>

#include "lockstep/fsdp/optimizer_state.h"
#include "lockstep/fsdp/sharded_files.h"
#include "lockstep/testing/temp_dir.h"
#include "tests/support/fsdp_models.h"

namespace lockstep::fsdp_edges_test {

using namespace fsdp_models;
using torch::optim::AdamW;

// FSDP-9
TEST(FsdpEdges, TheThirdDimIsCutAsTheFirstIs) {
  for (const int size : {2, 4}) {
    testing::run_threads_in_gtest({.world_size = size}, [](const World& world) {
      const auto build = [] { return torch::nn::Conv1d(torch::nn::Conv1dOptions(3, 5, 4)); };
      const auto third = [](const std::string&, const at::Tensor& parameter) {
        return parameter.dim() == 3 ? std::optional(ShardPlacement{.dim = 2}) : std::nullopt;
      };
      DistributedDataParallel ddp(built_from_seed(build), DdpOptions{.process_group = world.group()});
      auto model = built_from_seed(build);
      fully_shard(model, {.mesh = mesh_of(world), .shard_placement_fn = third});
      EXPECT_EQ(model->parameters()[0].sizes(), at::IntArrayRef({5, 3, 4 / world.world_size()}));
      const auto input = random_batch(2 * 3, 6, static_cast<uint64_t>(world.rank())).view({2, 3, 6});
      const auto output = model->forward(input);
      const auto expected = ddp->forward(input);
      EXPECT_TRUE(output.equal(expected));
      output.pow(2).sum().backward();
      expected.pow(2).sum().backward();
      expect_same_gradients(*model, *ddp.module(), "cut along dim 2", 1e-5);
    });
  }
}

// FSDP-16
TEST(FsdpEdges, AFlatParameterTakesGradientsFromBeforeThoughSomePartsHaveNone) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    auto model = mlp({3, 4, 2});
    model->layers[1]->forward(at::ones({1, 4})).sum().backward();
    fully_shard(model, {.mesh = mesh_of(world), .use_orig_params = false});
    const auto whole = at::cat({at::zeros({16}), at::ones({10})});
    const auto flat = model->parameters()[0];
    ASSERT_TRUE(flat.grad().defined());
    EXPECT_TRUE(flat.grad().equal(layout_of(flat)->cut(whole)));
  });
}

struct MetaBufferImpl : torch::nn::Module {
  at::Tensor forward() { return weight * offset; }
  at::Tensor weight = register_parameter("weight", at::ones({4}));
  at::Tensor offset = register_buffer("offset", at::ones({4}, at::kMeta));
};

// FSDP-21
TEST(FsdpEdges, BuffersWithoutMemoryAreFilled) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    auto model = std::make_shared<MetaBufferImpl>();
    const auto fill = [](torch::nn::Module& module) {
      const at::NoGradGuard no_grad;
      for (const auto& buffer : module.buffers(/*recurse=*/false)) buffer.fill_(3);
    };
    fully_shard(*model, {.mesh = mesh_of(world), .param_init_fn = fill});
    EXPECT_EQ(model->forward().sum().item<double>(), 12);
    expect_error([&] { fully_shard(*std::make_shared<MetaBufferImpl>(), {.mesh = mesh_of(world)}); },
                 {"give a param_init_fn"});
  });
}

// FSDP-79
TEST(FsdpEdges, ASummonedParameterMayGetItsFirstGradient) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    auto model = net();
    auto root = sharded(model, {.mesh = mesh_of(world)});
    {
      const auto summoned = root.summon_full_params({.with_grads = true});
      model->head->weight.mutable_grad() = at::arange(21, at::kFloat).view({3, 7});
    }
    const auto shard = model->named_parameters()["head.weight"];
    ASSERT_TRUE(shard.grad().defined());
    EXPECT_TRUE(shard.grad().equal(layout_of(shard)->cut(at::arange(21, at::kFloat).view({3, 7}))));
    EXPECT_FALSE(model->named_parameters()["head.bias"].grad().defined());
  });
}

// FSDP-32, FSDP-79: what was gathered before the scope is not used behind it.
TEST(FsdpEdges, ASummonEndsAGatherThatIsOnItsWay) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    auto model = net();
    auto root = sharded(model, {.mesh = mesh_of(world)});
    const at::NoGradGuard no_grad;
    auto plain = net();
    auto unit = *unit_of(*model->blocks[0]);
    for (const bool is_written : {false, true}) {
      unit.unshard(/*async=*/true);
      {
        const auto summoned = root.summon_full_params();
        if (is_written) model->blocks[0]->down->bias.fill_(3);
      }
      if (is_written) plain->blocks[0]->down->bias.fill_(3);
      const testing::Recorder recorder;
      EXPECT_TRUE(model->blocks[0]->forward(at::ones({2, 7})).equal(plain->blocks[0]->forward(at::ones({2, 7}))));
      EXPECT_EQ(recorder.events("launch").size(), 1u);
      unit.reshard();
    }
  });
}

struct CornerImpl : torch::nn::Module {
  torch::nn::Linear layer = register_module("layer", torch::nn::Linear(4, 4));
  at::Tensor corner = register_buffer("corner", at::zeros({1 << 18}).narrow(0, 0, 4));
};

// FSDP-74
TEST(FsdpEdges, FilesHoldWhatTensorsShowAndFailOnAllRanksTogether) {
  const testing::TempDir dir;
  testing::run_threads_in_gtest({.world_size = 2}, [&](const World& world) {
    auto model = std::make_shared<CornerImpl>();
    fully_shard(*model, {.mesh = mesh_of(world)});
    const auto path = dir.file("run");
    save_sharded(*model, path);
    for (const auto& file : std::filesystem::directory_iterator(dir.path())) {
      EXPECT_LT(std::filesystem::file_size(file), 1u << 16) << file;
    }
    barrier(world.group());
    // One rank's disk is full, say.
    expect_error([&] { save_sharded(*model, world.rank() == 1 ? "/nowhere/run" : path); },
                 {"state was not saved", "/nowhere/run.", ".shard1"});
    const auto files = std::filesystem::directory_iterator(dir.path());
    EXPECT_LE(std::distance(files, {}), 4)
        << "two parts, their index, and one that the other rank may not have removed";
    load_sharded(*model, path);
  });
}

struct CountingImpl : torch::nn::Module {
  torch::nn::Linear layer = register_module("layer", torch::nn::Linear(4, 4));
  at::Tensor ignored = register_parameter("ignored", at::zeros({3}));
  at::Tensor count = register_buffer("count", at::zeros({3}));
};

// FSDP-75
TEST(FsdpEdges, WholeStateIsACopy) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    auto model = std::make_shared<CountingImpl>();
    fully_shard(*model, {.mesh = mesh_of(world), .ignored_params = {model->ignored}});
    for (const bool cpu_offload : {false, true}) {
      const auto state = full_state_dict(*model, {.cpu_offload = cpu_offload});
      const at::NoGradGuard no_grad;
      for (auto& tensor : {model->ignored, model->count}) tensor.fill_(1);
      EXPECT_FALSE(state.at("ignored").any().item<bool>());
      EXPECT_FALSE(state.at("count").any().item<bool>());
      for (auto& tensor : {model->ignored, model->count}) tensor.zero_();
    }
  });
}

// FSDP-78: along each axis of a mesh.
TEST(FsdpEdges, OptimizersOfShardsThatHaveNotSteppedAlikeAreTold) {
  for (const int divisor : {1, 2}) {  // ranks that differ are neighbours, or replicas
    testing::run_threads_in_gtest({.world_size = 4}, [&](const World& world) {
      auto model = net();
      sharded(model, {.mesh = init_device_mesh("cpu", {2, 2}, {.mesh_dim_names = {"replicate", "shard"}})});
      AdamW optimizer(model->parameters(), 0.01);
      loss_of(model, world, 0).backward();
      if (world.rank() / divisor % 2 == 0) optimizer.step();
      expect_error([&] { full_optimizer_state_dict(*model, optimizer); }, {"the state of the optimizers", "'none'"});
    });
  }
}

struct TwiceImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& input) { return at::matmul(input, first); }
  at::Tensor first = register_parameter("first", at::ones({4, 4}));
  at::Tensor second = register_parameter("second", first);
};

// FSDP-67, FSDP-78
TEST(FsdpEdges, OptimizerStateIsFoundUnderEitherNameOfATiedParameter) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    auto model = std::make_shared<TwiceImpl>();
    fully_shard(*model, {.mesh = mesh_of(world)});
    const auto shard = model->parameters()[0];
    AdamW optimizer({shard}, 0.01);
    model->forward(at::ones({1, 4})).sum().backward();
    optimizer.step();
    const auto saved = full_optimizer_state_dict(*model, optimizer);
    ASSERT_EQ(saved.state.size(), 1u);
    for (const std::string name : {"first", "second"}) {
      auto renamed = saved;
      renamed.state = {{name, saved.state.begin()->second}};
      renamed.param_groups[0].params = {name};
      AdamW fresh({shard}, 0.5);
      load_full_optimizer_state_dict(*model, fresh, renamed);
      EXPECT_EQ(fresh.state().size(), 1u) << name;
      EXPECT_EQ(fresh.param_groups()[0].options().get_lr(), 0.01) << name;
    }
  });
}

}  // namespace lockstep::fsdp_edges_test
