// ColwiseParallel with input_reshard: the same values, less memory between forward and backward.
#include "lockstep/comm/world.h"
#include "lockstep/dtensor/dtensor.h"
#include "lockstep/testing/gtest.h"
#include "lockstep/testing/memory_probe.h"
#include "lockstep/testing/recorder.h"
#include "lockstep/tp/parallelize_module.h"
#include "tests/support/dtensor_line.h"

namespace lockstep::input_reshard_test {

using testing::check_equal;
using testing::numbers;

const testing::Tolerance kClose{.relative = 1e-5, .absolute = 1e-6};

torch::nn::Linear layer(int64_t in, int64_t out) {
  torch::nn::Linear linear(in, out);
  const at::NoGradGuard no_grad;
  linear->weight.copy_(numbers({out, in}, 1));
  linear->bias.copy_(numbers({out}, 2));
  return linear;
}

// TP-45: gradients equal those of one device, uneven sizes too; backward gathers what was kept.
LOCKSTEP_THREAD_TEST(InputReshard, GivesTheSameGradients, 3) {
  const auto mesh = init_device_mesh("cpu", {world.world_size()});
  for (const auto& sizes : {std::vector<int64_t>{5, 4}, {2, 7, 4}, {4}}) {
    auto one = layer(4, 6);
    auto x_whole = numbers(sizes, 3).requires_grad_();
    const auto expected = one->forward(x_whole);
    expected.pow(2).sum().backward();

    auto linear = layer(4, 6);
    parallelize_module(*linear, mesh, ColwiseParallel({.output_layouts = Replicate(), .input_reshard = true}));
    auto x = x_whole.detach().clone().requires_grad_();
    const auto out = linear->forward(x);
    check_equal("out", out, expected, kClose);
    testing::Recorder recorder;
    out.pow(2).sum().backward();
    testing::expect_count(recorder.events("launch"), "all_reduce", 1);
    EXPECT_FALSE(recorder.events("launch").empty());
    check_equal("x", x.grad(), x_whole.grad(), kClose);
    const Layout cut(mesh, {Shard(0)}, {6, 4});
    check_equal("weight", linear->parameters()[0].grad(), cut.cut(one->weight.grad()), kClose);

    const at::NoGradGuard no_grad;  // nothing is kept, nothing cut
    check_equal("evaluated", linear->forward(x), expected, kClose);
  }
}

// TP-45: what is kept for backward is a rank's part of the input.
LOCKSTEP_THREAD_TEST(InputReshard, KeepsAPartOfTheInput, 2) {
  const auto mesh = init_device_mesh("cpu", {world.world_size()});
  const auto kept_bytes = [&](bool input_reshard) {
    auto linear = layer(256, 2);
    parallelize_module(*linear, mesh, ColwiseParallel({.input_reshard = input_reshard}));
    const auto x = numbers({256, 256}, 3);
    testing::MemoryProbe probe;
    const auto out = linear->forward(x * 2);  // what only the layer keeps
    return probe.total().current_bytes;
  };
  const auto whole = kept_bytes(false);
  const auto part = kept_bytes(true);
  const int64_t input_bytes = 256 * 256 * 4;
  EXPECT_GE(whole, input_bytes);
  EXPECT_LT(part, input_bytes / 2 + input_bytes / 8);
}

// TP-45: second derivatives find their way through what was kept.
LOCKSTEP_THREAD_TEST(InputReshard, IsTwiceDifferentiable, 2) {
  const auto mesh = init_device_mesh("cpu", {world.world_size()});
  const auto second = [](const at::Tensor& out, const at::Tensor& weight, const at::Tensor& x) {
    const auto first = torch::autograd::grad({out.pow(3).sum()}, {weight}, {}, true, /*create_graph=*/true)[0];
    return torch::autograd::grad({first.pow(2).sum()}, {x})[0];
  };
  auto one = layer(4, 6);
  const auto x_whole = numbers({5, 4}, 3).requires_grad_();
  const auto expected = second(one->forward(x_whole), one->weight, x_whole);

  auto linear = layer(4, 6);
  parallelize_module(*linear, mesh, ColwiseParallel({.output_layouts = Replicate(), .input_reshard = true}));
  const auto x = x_whole.detach().clone().requires_grad_();
  // Each rank squares its part of the weight's gradient: the parts' shares of x's gradient are summed on the way.
  check_equal("second", second(linear->forward(x), linear->parameters()[0], x), expected,
              {.relative = 1e-4, .absolute = 1e-4});
}

// TP-45
LOCKSTEP_THREAD_TEST(InputReshard, IsRefusedForIds, 2) {
  const auto mesh = init_device_mesh("cpu", {world.world_size()});
  torch::nn::Embedding embedding(8, 4);
  testing::expect_error([&] { parallelize_module(*embedding, mesh, ColwiseParallel({.input_reshard = true})); },
                        {"input_reshard", "Embedding"});
}

}  // namespace lockstep::input_reshard_test
