// Divided layers on an accelerator, alone and under fully_shard(), against one device.
#include <functional>

#include "lockstep/fsdp/fully_shard.h"
#include "lockstep/shard/gather.h"
#include "lockstep/shard/layout_of.h"
#include "lockstep/tp/parallelize_module.h"
#include "tests/support/dtensor_line.h"
#include "tests/support/on_gpu.h"

namespace lockstep::tp_cuda_test {

using testing::check_equal;
using testing::numbers;

constexpr testing::Tolerance kRounding{.relative = 1e-4, .absolute = 1e-5};

struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    register_module("norm", norm);
    register_module("up", up);
    register_module("down", down);
    const at::NoGradGuard no_grad;
    uint64_t seed = 1;
    for (auto& each : parameters()) each.copy_(numbers(each.sizes(), seed++) * 0.5);
  }
  at::Tensor forward(const at::Tensor& x) { return x + down(at::tanh(up(norm(x)))); }

  torch::nn::LayerNorm norm{torch::nn::LayerNormOptions({4})};
  torch::nn::Linear up{4, 7};
  torch::nn::Linear down{7, 4};
};
TORCH_MODULE(Block);

class TpOnGpu : public testing::OnGpu {
 protected:
  static Block block_of(const World& world) {
    Block block;
    block->to(world.device());
    return block;
  }
  static at::Tensor batch_of(const World& world, int step) {
    return numbers({2, 6, 4}, 10 + static_cast<uint64_t>(step)).to(world.device());
  }

  /// On the pieces that `cut` makes of the batches. Gradients are averages over `data_ranks`.
  static void train(Block& block, const World& world, const std::function<at::Tensor(const at::Tensor&)>& cut,
                    int data_ranks = 1) {
    torch::optim::SGD optimizer(block->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      const auto batch = batch_of(world, step);
      (block->forward(cut(batch)).pow(2).sum() * data_ranks / batch.numel()).backward();
      optimizer.step();
    }
  }

  static void expect_same(const Block& block, const Block& whole, const std::string& what) {
    const auto expected = whole->named_parameters();
    for (const auto& item : block->named_parameters()) {
      const auto value = item.value().detach();
      EXPECT_TRUE(value.is_cuda());
      const auto layout = layout_of(item.value());
      check_equal(what + " " + item.key(), layout ? gather_whole(value, *layout) : value, expected[item.key()].detach(),
                  kRounding);
    }
  }
};

at::Tensor all_of(const at::Tensor& batch) {
  return batch;
}

// TP-33, TP-34, TP-37
TEST_F(TpOnGpu, StylesTrainAsOneDevice) {
  on_gpu([](const World& world) {
    const auto mesh = DeviceMesh::from_group(world.group(), "cuda");
    auto expected = block_of(world);
    train(expected, world, all_of);
    auto block = block_of(world);
    parallelize_module(block, mesh, {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}});
    train(block, world, all_of);
    expect_same(block, expected, "divided");

    auto sequence = block_of(world);
    parallelize_module(sequence, mesh,
                       {{"norm", SequenceParallel()},
                        {"up", ColwiseParallel({.input_layouts = Shard(1)})},
                        {"down", RowwiseParallel({.output_layouts = Shard(1)})}});
    train(sequence, world, [&](const at::Tensor& batch) {
      return batch.chunk(world.world_size(), 1)[static_cast<std::size_t>(world.rank())];
    });
    expect_same(sequence, expected, "cut sequences");
  });
}

// TP-49, TP-53
TEST_F(TpOnGpu, TwoDimensionsTrainAsOneDevice) {
  testing::run_threads_in_gtest({.world_size = 4, .backend = "gloo"}, [](const World& world) {
    const auto mesh = init_device_mesh("cuda", {2, 2}, {.mesh_dim_names = {"dp", "tp"}});
    auto expected = block_of(world);
    train(expected, world, all_of);
    auto block = block_of(world);
    parallelize_module(block, mesh["tp"], {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}});
    fully_shard(block, {.mesh = mesh["dp"]});
    const auto half = [&](const at::Tensor& batch) {
      return batch.chunk(2)[static_cast<std::size_t>(mesh.get_local_rank("dp"))];
    };
    train(block, world, half, /*data_ranks=*/2);
    expect_same(block, expected, "two dimensions");
  });
}

}  // namespace lockstep::tp_cuda_test
