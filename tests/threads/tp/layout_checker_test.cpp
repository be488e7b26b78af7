// LayoutChecker over modules that are divided: right steps pass, an input that differs is named.
#include "lockstep/dtensor/layout_checker.h"

#include "lockstep/comm/world.h"
#include "lockstep/fsdp/fully_shard.h"
#include "lockstep/testing/gtest.h"
#include "lockstep/tp/parallelize_module.h"
#include "tests/support/dtensor_line.h"

namespace lockstep::tp_layout_checker_test {

using testing::numbers;

struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    register_module("norm", norm);
    register_module("in_proj", in_proj);
    register_module("out_proj", out_proj);
    const at::NoGradGuard no_grad;
    for (auto& each : parameters()) each.fill_(0.25);
  }
  at::Tensor forward(const at::Tensor& x) { return x + out_proj(at::gelu(in_proj(norm(x)))); }

  torch::nn::LayerNorm norm{torch::nn::LayerNormOptions({4})};
  torch::nn::Linear in_proj{4, 6};
  torch::nn::Linear out_proj{6, 4};
};
TORCH_MODULE(Block);

ParallelPlan plan() {
  return {{"norm", SequenceParallel()},
          {"in_proj", ColwiseParallel({.input_layouts = Shard(1)})},
          {"out_proj", RowwiseParallel({.output_layouts = Shard(1)})}};
}

// TP-61: a divided block, and one inside of fully_shard(): its memory is there only while it computes.
LOCKSTEP_THREAD_TEST(LayoutCheckerOfModules, LetsRightStepsPass, 4) {
  const auto mesh = init_device_mesh("cpu", {2, 2}, {.mesh_dim_names = {"dp", "tp"}});
  Block block;
  parallelize_module(*block, mesh["tp"], plan());
  fully_shard(*block, {.mesh = mesh["dp"]});
  torch::optim::SGD optimizer(block->parameters(), 0.1);
  const LayoutChecker checker;
  for (uint64_t step = 0; step < 2; ++step) {
    const auto x = numbers({2, 4, 4}, 10 * step + static_cast<uint64_t>(mesh.get_local_rank("dp")));
    block->forward(x.chunk(2, 1)[static_cast<std::size_t>(mesh.get_local_rank("tp"))]).pow(2).sum().backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  EXPECT_GT(checker.compared(), 20);
  check_layouts(*block);
}

// TP-58, TP-61: ranks that should share a batch, and do not
LOCKSTEP_THREAD_TEST(LayoutCheckerOfModules, NamesAnInputThatDiffers, 2) {
  const auto mesh = init_device_mesh("cpu", {world.world_size()});
  torch::nn::Linear linear(4, 6);
  parallelize_module(*linear, mesh, ColwiseParallel());
  const auto x = numbers({2, 4}, static_cast<uint64_t>(world.rank()));
  const LayoutChecker checker;
  testing::expect_error([&] { linear->forward(x); }, {"DTensor::from_local()", "rank 1 holds other values", "[2, 4]"});
}

// TP-61: a replicated parameter that a rank has changed.
LOCKSTEP_THREAD_TEST(LayoutCheckerOfModules, NamesAParameterThatDiffers, 2) {
  const auto mesh = init_device_mesh("cpu", {world.world_size()});
  Block block;
  parallelize_module(*block, mesh, plan());
  check_layouts(*block);
  {
    const at::NoGradGuard no_grad;
    if (world.rank() == 1) block->named_parameters()["out_proj.bias"].add_(1);
  }
  testing::expect_error([&] { check_layouts(*block); }, {"parameter 'out_proj.bias'", "rank 1"});
}

}  // namespace lockstep::tp_layout_checker_test
