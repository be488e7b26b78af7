// Checkpointing on an accelerator, whose backward runs in threads of autograd's own.
#include "tests/support/fsdp_models.h"

namespace lockstep::checkpointed_gpu_test {

using namespace fsdp_models;

class CheckpointedOnGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    if (gpu_count() == 0) GTEST_SKIP() << "no GPU";
  }
};

const at::Device kGpu(at::kCUDA, 0);

at::Tensor weight() {
  torch::manual_seed(1);
  return at::randn({64, 64}).to(kGpu).requires_grad_();
}

std::vector<at::Tensor> taken(const std::vector<at::Tensor>& leaves) {
  std::vector<at::Tensor> gradients;
  for (const auto& leaf : leaves) gradients.push_back(std::exchange(leaf.mutable_grad(), at::Tensor()).cpu());
  return gradients;
}

// FSDP-84
TEST_F(CheckpointedOnGpu, DrawsTheSameNumbersAgain) {
  const auto w = weight();
  const auto x = weight();
  const auto f = [&](const at::Tensor& in) { return at::dropout(at::gelu(at::mm(in, w)), 0.5, true).exp(); };
  torch::manual_seed(3);
  f(x).sum().backward();
  const auto wanted = taken({w, x});
  const auto next = at::rand({4}, at::TensorOptions(kGpu));
  for (const auto& policy : {CheckpointPolicyFn(), save_operators({"aten::mm", "aten::native_dropout"})}) {
    torch::manual_seed(3);
    const auto y = checkpoint({.policy = policy}, f, x);
    const auto drawn = at::rand({4}, at::TensorOptions(kGpu));
    EXPECT_TRUE(drawn.equal(next));
    y.sum().backward();
    expect_close(taken({w, x}), wanted, 0);
  }
  // A function whose arguments are on the host.
  torch::manual_seed(3);
  checkpoint([&](double scale) { return f(x) * scale; }, 1.0).sum().backward();
  expect_close(taken({w, x}), wanted, 0);
}

// Graphs that are built inside of a function are built by autograd's threads: their tensors are dropped too, both
// times.
TEST_F(CheckpointedOnGpu, SupportsBackwardInsideOfTheFunction) {
  const auto x = weight();
  const auto f = [](const at::Tensor& in) {
    const auto y = at::mm(in, in).sin();
    return torch::autograd::grad({y.sum()}, {in}, {}, std::nullopt, /*create_graph=*/true)[0].pow(2);
  };
  f(x).sum().backward();
  const auto wanted = taken({x});
  for (const bool early_stop : {true, false}) {
    checkpoint({.early_stop = early_stop}, f, x).sum().backward();
    expect_close(taken({x}), wanted, 0);
  }
}

TEST_F(CheckpointedOnGpu, SavesOnTheHost) {
  const auto w = weight();
  const auto x = weight();
  const auto f = [&] { return at::mm(at::gelu(at::mm(x, w)), w).mul(0.01).exp().t().contiguous().sin(); };
  f().sum().backward();
  const auto wanted = taken({w, x});
  for (const bool pin_memory : {false, true}) {
    at::Tensor y;
    {
      const auto scope = save_on_cpu({.pin_memory = pin_memory});
      y = f();
    }
    y.sum().backward();
    expect_close(taken({w, x}), wanted, 0);
  }
  const CheckpointPolicyFn offload = [](const OperatorCall&) { return CheckpointPolicy::kMustCpuOffload; };
  checkpoint({.policy = offload}, [&](const at::Tensor&) { return f(); }, x).sum().backward();
  expect_close(taken({w, x}), wanted, 0);
}

// FSDP-83
TEST_F(CheckpointedOnGpu, TrainsShardedModels) {
  testing::run_threads_in_gtest({.world_size = 2, .backend = "gloo"}, [](const World& world) {
    const auto gradients = [&](bool is_checkpointed) {
      auto model = net();
      model->to(kGpu);
      const FullyShardOptions options{.mesh = DeviceMesh::from_group(world.group(), "cuda")};
      for (auto& block : model->blocks) fully_shard(block, options);
      auto hidden = model->table->forward(batch(world, 1).to(kGpu));
      for (auto& block : model->blocks) {
        hidden = is_checkpointed ? checkpoint({.preserve_rng_state = false}, block, hidden) : block->forward(hidden);
      }
      hidden.pow(2).mean().backward();
      std::vector<at::Tensor> all;
      for (auto& block : model->blocks) {
        for (const auto& parameter : block->parameters()) all.push_back(parameter.grad().cpu());
      }
      return all;
    };
    expect_close(gradients(true), gradients(false), 0);
  });
}

}  // namespace lockstep::checkpointed_gpu_test
