// Tensor parallelism inside of fully_shard(): the stack of MLPs that Python's own tests train on two axes, against one
// device with the whole batch.
#include "lockstep/checkpointing/checkpoint.h"
#include "lockstep/comm/world.h"
#include "lockstep/dtensor/dtensor.h"
#include "lockstep/fsdp/fully_shard.h"
#include "lockstep/fsdp/state_dict.h"
#include "lockstep/optim/clip_grad.h"
#include "lockstep/testing/gtest.h"
#include "lockstep/tp/parallelize_module.h"
#include "tests/support/fsdp_models.h"

namespace lockstep::tp_two_dimensional_test {
namespace {

using fsdp_models::built_from_seed;

struct MlpImpl : torch::nn::Module {
  MlpImpl(int64_t dim, int64_t multiplier)
      : in_proj(register_module("in_proj", torch::nn::Linear(dim, multiplier * dim))),
        out_proj(register_module("out_proj", torch::nn::Linear(multiplier * dim, dim))) {}
  at::Tensor forward(const at::Tensor& x) { return at::relu(out_proj(at::relu(in_proj(x)))); }
  torch::nn::Linear in_proj;
  torch::nn::Linear out_proj;
};
TORCH_MODULE(Mlp);

struct Settings {
  int64_t dim = 8;
  bool cuts_sequence = false;
  bool recomputes = false;
  bool keeps_parameters = false;
};

struct StackImpl : torch::nn::Module {
  explicit StackImpl(const Settings& settings) : recomputes(settings.recomputes) {
    for (const int64_t multiplier : {3, 4, 3}) {
      mlps.push_back(register_module(std::to_string(mlps.size()), Mlp(settings.dim, multiplier)));
    }
    if (settings.cuts_sequence) {
      norm = register_module("3", torch::nn::LayerNorm(torch::nn::LayerNormOptions({settings.dim})));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& mlp : mlps) {
      x = recomputes ? checkpoint([&](const at::Tensor& y) { return mlp->forward(y); }, x) : mlp->forward(x);
    }
    return norm ? norm(x) : x;
  }
  const bool recomputes;
  std::vector<Mlp> mlps;
  torch::nn::LayerNorm norm{nullptr};
};
TORCH_MODULE(Stack);

void parallelize(Stack& stack, const DeviceMesh& mesh, const Settings& settings) {
  ParallelPlan plan = {
      {"*.in_proj", ColwiseParallel({.use_local_output = false})},
      {"[01].out_proj", RowwiseParallel({.use_local_output = false})},
      {"2.out_proj", settings.cuts_sequence ? RowwiseParallel({.output_layouts = Shard(1)}) : RowwiseParallel()}};
  if (settings.cuts_sequence) plan.emplace_back("3", SequenceParallel());
  parallelize_module(*stack, mesh["tp"], plan);
  const FullyShardOptions options{.mesh = mesh["dp"], .reshard_after_forward = !settings.keeps_parameters};
  for (auto& mlp : stack->mlps) fully_shard(mlp, options);
  fully_shard(stack, options);
}

void expect_close(const std::string& what, const at::Tensor& actual, const at::Tensor& expected) {
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  EXPECT_TRUE(at::allclose(actual, expected, 1e-4, 1e-5)) << what << "\n" << actual << "\nis not\n" << expected;
}

/// Three steps; ranks of one "dp" coordinate have the same rows.
void expect_trains_as_one_device(const World& world, const Settings& settings) {
  const auto mesh = init_device_mesh("cpu", {2, 2}, {.mesh_dim_names = {"dp", "tp"}});
  auto whole = built_from_seed([&] { return Stack(settings); });
  auto stack = built_from_seed([&] { return Stack(settings); });
  parallelize(stack, mesh, settings);
  torch::optim::SGD optimizer(stack->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  torch::optim::SGD of_whole(whole->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < 3; ++step) {
    const auto batch = built_from_seed([&] { return at::randn({4, 6, settings.dim}); }, 10 + step);
    optimizer.zero_grad();
    of_whole.zero_grad();
    auto y = stack(batch.chunk(2)[mesh.get_local_rank("dp")]);
    if (is_dtensor(y)) y = DTensor(y).full_tensor();
    const auto expected = whole(batch);
    expect_close("output", y, expected.chunk(2)[mesh.get_local_rank("dp")]);
    y.pow(2).mean().backward();
    expected.pow(2).mean().backward();
    const auto norm = clip_grad_norm_(stack->parameters(), 0.5);
    const auto norm_of_whole = torch::nn::utils::clip_grad_norm_(whole->parameters(), 0.5);
    EXPECT_NEAR(norm.item<double>(), norm_of_whole, 1e-4) << "step " << step << " rank " << world.rank();
    optimizer.step();
    of_whole.step();
    const auto state = full_state_dict(*stack);
    for (const auto& parameter : whole->named_parameters()) {
      expect_close(parameter.key(), state.at(parameter.key()), parameter.value());
    }
  }
}

// TP-49, TP-53, TP-54, TP-55, TP-57: DTensors between layers, sizes that two ranks do and do not divide
LOCKSTEP_THREAD_TEST(TwoDimensional, TrainsTheStackAsOneDevice, 4) {
  for (const int64_t dim : {8, 5}) expect_trains_as_one_device(world, {.dim = dim});
}

// TP-54, TP-57
LOCKSTEP_THREAD_TEST(TwoDimensional, TrainsTheStackWithCutSequences, 4) {
  for (const int64_t dim : {8, 5}) expect_trains_as_one_device(world, {.dim = dim, .cuts_sequence = true});
}

// TP-49, TP-54
LOCKSTEP_THREAD_TEST(TwoDimensional, TrainsTheStackWithCheckpoints, 4) {
  for (const bool cuts : {false, true}) {
    expect_trains_as_one_device(world, {.cuts_sequence = cuts, .recomputes = true});
  }
  expect_trains_as_one_device(world, {.recomputes = true, .keeps_parameters = true});
}

}  // namespace
}  // namespace lockstep::tp_two_dimensional_test
