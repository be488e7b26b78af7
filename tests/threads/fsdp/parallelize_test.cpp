// fully_shard() over modules that parallelize_module() has cut, against one process with the whole batch.
#include "lockstep/checkpointing/checkpoint.h"
#include "lockstep/ddp/distributed_data_parallel.h"
#include "lockstep/dtensor/layout_checker.h"
#include "lockstep/fsdp/sharded_files.h"
#include "lockstep/testing/fsdp/small_models.h"
#include "lockstep/testing/temp_dir.h"
#include "lockstep/tp/parallelize_module.h"
#include "tests/support/tensor_parallel_models.h"

namespace lockstep::fsdp_parallelize_test {

using namespace tensor_parallel_models;
using torch::optim::Adam;
using torch::optim::SGD;

struct LayerImpl : torch::nn::Module {
  LayerImpl()
      : norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})))),
        up(register_module("up", torch::nn::Linear(kWidth, kHidden + 1))),
        down(register_module("down", torch::nn::Linear(kHidden + 1, kWidth))) {}
  at::Tensor forward(const at::Tensor& input) {
    return input + down->forward(at::tanh(up->forward(norm->forward(input))));
  }
  torch::nn::LayerNorm norm;
  torch::nn::Linear up;
  torch::nn::Linear down;
};
TORCH_MODULE(Layer);

struct StackImpl : torch::nn::Module {
  StackImpl() : head(register_module("head", torch::nn::Linear(kWidth, 3))) {
    for (int i = 0; i < 2; ++i) layers.push_back(register_module("layer" + std::to_string(i), Layer()));
  }
  at::Tensor forward(const at::Tensor& input, bool is_checkpointed = false) {
    auto hidden = input;
    for (auto& layer : layers) hidden = is_checkpointed ? checkpoint(layer, hidden) : layer->forward(hidden);
    return head->forward(hidden);
  }
  torch::nn::Linear head;
  std::vector<Layer> layers;
};
TORCH_MODULE(Stack);

Stack stack(uint64_t seed = 3) {
  return built_from_seed([] { return Stack(); }, seed);
}

Stack parallel_stack(const DeviceMesh& mesh, const FullyShardOptions& options, uint64_t seed = 3) {
  auto made = stack(seed);
  parallelize_module(*made, mesh["tp"], {{"layer*.up", ColwiseParallel()}, {"layer*.down", RowwiseParallel()}});
  for (auto& layer : made->layers) fully_shard(layer, options);
  fully_shard(made, options);
  return made;
}

at::Tensor batch_of(int step, int64_t index, int64_t count) {
  const auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(7 + step));
  return at::randn({kBatch, kWidth}, generator, at::TensorOptions()).chunk(count)[static_cast<std::size_t>(index)];
}

void train(Stack& made, torch::optim::Optimizer& optimizer, const GroupPtr& group, int from, int to,
           bool is_checkpointed = false) {
  for (int step = from; step < to; ++step) {
    optimizer.zero_grad();
    const auto batch = group ? batch_of(step, group->getRank(), group->getSize()) : batch_of(step, 0, 1);
    made->forward(batch, is_checkpointed).to(at::kFloat).pow(2).mean().backward();
    clip_grad_norm_(made->parameters(), 0.5);
    optimizer.step();
  }
}

void expect_same(const Stack& made, const Stack& whole, double tolerance, const std::string& what) {
  const auto state = full_state_dict(*made);
  for (const auto& item : whole->named_parameters()) {
    EXPECT_TRUE(at::allclose(state.at(item.key()), item.value().detach(), tolerance, tolerance))
        << what << " " << item.key();
  }
}

// TP-49, TP-50, TP-53, TP-54, TP-55
TEST(FsdpParallelize, TrainsAsOneProcess) {
  for (const auto& [dp, tp] : {std::pair(2, 2), std::pair(3, 2)}) {
    testing::run_threads_in_gtest({.world_size = dp * tp}, [dp = dp, tp = tp](const World&) {
      const auto mesh = mesh_of(dp, tp);
      auto expected = stack();
      Adam wanted(expected->parameters(), 0.01);
      train(expected, wanted, nullptr, 0, 3);
      for (const bool is_checkpointed : {false, true}) {
        auto made = parallel_stack(mesh, {.mesh = mesh["dp"]});
        Adam optimizer(made->parameters(), 0.01);
        train(made, optimizer, mesh.get_group("dp"), 0, 3, is_checkpointed);
        expect_same(made, expected, 1e-4, is_checkpointed ? "checkpointed" : "plain");
      }
      const MixedPrecisionPolicy policy{.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
      auto made = parallel_stack(mesh, {.mesh = mesh["dp"], .mp_policy = policy});
      SGD optimizer(made->parameters(), 0.1);
      train(made, optimizer, mesh.get_group("dp"), 0, 3);
      auto again = stack();
      SGD plain(again->parameters(), 0.1);
      train(again, plain, nullptr, 0, 3);
      expect_same(made, again, 0.05, "bfloat16");
    });
  }
}

// TP-53, TP-54: activations between layers are cut along the sequence, so gradients of norms are terms at first
TEST(FsdpParallelize, TrainsWithSequenceParallelism) {
  testing::run_threads_in_gtest({.world_size = 4}, [](const World&) {
    const auto mesh = mesh_of(2, 2);
    const auto run = [](Stack& made, torch::optim::Optimizer& optimizer, int64_t dp, int64_t dp_ranks, int64_t tp,
                        int64_t tp_ranks) {
      for (int step = 0; step < 3; ++step) {
        const auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(7 + step));
        const auto all = at::randn({kBatch, 4, kWidth}, generator, at::TensorOptions());
        auto hidden =
            all.chunk(dp_ranks)[static_cast<std::size_t>(dp)].chunk(tp_ranks, 1)[static_cast<std::size_t>(tp)];
        optimizer.zero_grad();
        for (auto& layer : made->layers) hidden = layer->forward(hidden);
        (hidden.pow(2).sum() / (all.numel() / dp_ranks)).backward();
        clip_grad_norm_(optimizer, 0.5);
        optimizer.step();
      }
    };
    auto expected = stack();
    Adam wanted(expected->parameters(), 0.01);
    run(expected, wanted, 0, 1, 0, 1);
    auto made = stack();
    parallelize_module(*made, mesh["tp"],
                       {{"layer*.norm", SequenceParallel()},
                        {"layer*.up", ColwiseParallel({.input_layouts = Shard(1)})},
                        {"layer*.down", RowwiseParallel({.output_layouts = Shard(1)})}});
    for (auto& layer : made->layers) fully_shard(layer, {.mesh = mesh["dp"]});
    fully_shard(made, {.mesh = mesh["dp"]});
    Adam optimizer(made->parameters(), 0.01);
    run(made, optimizer, mesh.get_local_rank("dp"), 2, mesh.get_local_rank("tp"), 2);
    expect_same(made, expected, 1e-4, "sequence parallel");
  });
}

// A unit that nobody prefetched is gathered by the operator itself, behind the style that asks what is trained.
TEST(FsdpParallelize, LayersThawAndFreezeAtOnce) {
  testing::run_threads_in_gtest({.world_size = 4}, [](const World&) {
    const auto mesh = mesh_of(2, 2);
    for (const bool by_member : {false, true}) {
      const auto run = [&](Stack& made, const GroupPtr& group) {
        SGD optimizer(made->parameters(), 0.1);
        for (int step = 0; step < 6; ++step) {
          for (auto& layer : made->layers) {
            const bool is_trained = step % 2 == 1;
            if (by_member) {
              layer->up->weight.set_requires_grad(is_trained);
              layer->down->weight.set_requires_grad(is_trained);
            } else {
              layer->up->named_parameters()["weight"].set_requires_grad(is_trained);
              layer->down->named_parameters()["weight"].set_requires_grad(is_trained);
            }
          }
          train(made, optimizer, group, step, step + 1);
        }
      };
      auto expected = stack();
      run(expected, nullptr);
      auto made = stack();
      parallelize_module(*made, mesh["tp"], {{"layer*.up", ColwiseParallel()}, {"layer*.down", RowwiseParallel()}});
      for (auto& layer : made->layers) {
        for (const auto& child : layer->children()) fully_shard(*child, {.mesh = mesh["dp"]});
      }
      fully_shard(made, {.mesh = mesh["dp"]});
      run(made, mesh.get_group("dp"));
      expect_same(made, expected, 1e-5, by_member ? "by member" : "by parameter");
    }
  });
}

// FSDP-86, TEST-36: tensor parallel, then checkpoints, then units
TEST(FsdpParallelize, StackOfTheKitIsDividedCheckpointedAndSharded) {
  for (const auto& [dp, tp] : {std::pair(1, 1), std::pair(1, 2), std::pair(1, 3), std::pair(2, 2)}) {
    testing::run_threads_in_gtest({.world_size = dp * tp}, [dp = dp, tp = tp](const World&) {
      const auto mesh = mesh_of(dp, tp);
      const auto input = [](int64_t rank) {
        return at::randn({2, 6, 5}, at::detail::createCPUGenerator(static_cast<uint64_t>(rank)), at::TensorOptions());
      };
      for (const bool has_norm : {false, true}) {
        const auto build = [&] {
          testing::MLPStack made(5, has_norm);
          // Ones would leave nothing of gradients but rounding.
          if (has_norm) torch::nn::init::normal_(made->norm->weight);
          return made;
        };
        auto expected = built_from_seed(build, 4);
        for (int64_t rank = 0; rank < dp; ++rank) (expected->forward(input(rank)).pow(2).mean() / dp).backward();
        auto made = built_from_seed(build, 4);
        made->parallelize(mesh["tp"], mesh["dp"], /*use_activation_checkpointing=*/true);
        made->forward(input(mesh.get_local_rank("dp"))).pow(2).mean().backward();
        const auto wanted = expected->named_parameters();
        for (const auto& item : made->named_parameters()) {
          const auto layout = layout_of(item.value());
          const auto whole = wanted[item.key()].grad();
          EXPECT_TRUE(at::allclose(item.value().grad(), layout ? layout->cut(whole) : whole, 1e-4, 1e-6))
              << mesh << ", " << item.key();
        }
        if (dp == 1) continue;
        expect_error([&] { DistributedDataParallel(made, DdpOptions{.process_group = mesh.get_group("dp")}); },
                     {"is a shard", "leave DistributedDataParallel out"});
        auto late = built_from_seed(build, 4);
        fully_shard(late, {.mesh = mesh["dp"]});
        expect_error([&] { parallelize_module(late, mesh["tp"], {{"*.in_proj", ColwiseParallel()}}); },
                     {"'0.in_proj.weight'", "before fully_shard()"});
      }
    });
  }
}

// TP-51
TEST(FsdpParallelize, KindsOfDevicesMustMatch) {
  testing::run_threads_in_gtest({.world_size = 4}, [](const World& world) {
    const auto mesh = mesh_of(2, 2);
    auto on_host = built_from_seed([] { return torch::nn::Linear(4, 6); });
    expect_error(
        [&] { parallelize_module(on_host, DeviceMesh::from_group(mesh.get_group("tp"), "cuda"), ColwiseParallel()); },
        {"'weight' is on cpu", "one of cuda devices", "Move the module"});
    EXPECT_EQ(layout_of(on_host->weight), nullptr) << "nothing has changed";
    barrier(world.group());
  });
}

// TP-58: one batch for the ranks of a tp group, others for other groups
TEST(FsdpParallelize, SeedsAreThoseOfDataRanks) {
  testing::run_threads_in_gtest({.world_size = 4}, [](const World& world) {
    const auto mesh = mesh_of(2, 2);
    auto made = parallel_stack(mesh, {.mesh = mesh["dp"]});
    const auto drawn_by = [](int64_t seed) {
      return at::randn({3, kWidth}, at::detail::createCPUGenerator(static_cast<uint64_t>(seed)), at::TensorOptions());
    };
    const auto batch = drawn_by(mesh.get_local_rank("dp"));
    const auto of_first = [&](const std::string& axis) {
      auto first = batch.clone();
      broadcast(first, 0, mesh.get_group(axis));
      return first;
    };
    testing::check_equal("over tp", batch, of_first("tp"));
    EXPECT_EQ(batch.equal(of_first("dp")), mesh.get_local_rank("dp") == 0) << "other groups draw others";
    const LayoutChecker checker;
    made->forward(batch).pow(2).mean().backward();
    EXPECT_GT(checker.compared(), 0);
    expect_error([&] { made->forward(drawn_by(world.rank())); }, {"holds other values", "along mesh dim 0"});
    barrier(world.group());
  });
}

// TP-56
TEST(FsdpParallelize, FilesLoadOnOtherMeshes) {
  const testing::TempDir dir;
  const auto path = dir.file("run");
  testing::run_threads_in_gtest({.world_size = 4}, [&](const World&) {
    const auto mesh = mesh_of(2, 2);
    auto expected = stack();
    Adam wanted(expected->parameters(), 0.01);
    train(expected, wanted, nullptr, 0, 4);
    auto made = parallel_stack(mesh, {.mesh = mesh["dp"]});
    Adam optimizer(made->parameters(), 0.01);
    train(made, optimizer, mesh.get_group("dp"), 0, 2);
    save_sharded(*made, optimizer, path);
    for (const auto& [dp, tp] : {std::pair(4, 1), std::pair(1, 4)}) {
      const auto other = mesh_of(dp, tp);
      auto again = parallel_stack(other, {.mesh = other["dp"]}, 6);
      Adam resumed(again->parameters(), 0.01);
      load_sharded(*again, resumed, path);
      train(again, resumed, other.get_group("dp"), 2, 4);
      expect_same(again, expected, 1e-4, other.to_string());
    }
    auto one = stack(6);
    Adam alone(one->parameters(), 0.01);
    load_sharded(*one, alone, path);
    train(one, alone, nullptr, 2, 4);
    expect_same(one, expected, 1e-4, "one process");
  });
}

}  // namespace lockstep::fsdp_parallelize_test
