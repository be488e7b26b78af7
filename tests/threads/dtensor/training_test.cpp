// DTensors in what programs do with tensors: optimizers, clipping, hooks, autograd's functions and modes, autocast,
// checkpointing, threads. Against one device.
#include <ATen/autocast_mode.h>

#include "lockstep/checkpointing/checkpoint.h"
#include "lockstep/comm/world.h"
#include "lockstep/optim/optimizers.h"
#include "lockstep/testing/gtest.h"
#include "lockstep/testing/recorder.h"
#include "tests/support/dtensor_cases.h"
#include "tests/support/dtensor_line.h"

namespace lockstep::training_test {
namespace {

using dtensor_cases::distributed;
using dtensor_cases::values_of;
using testing::check_equal;
using testing::expect_error;
using testing::Tolerance;
using Sizes = std::vector<int64_t>;
using testing::line;

constexpr Tolerance kClose = {.relative = 1e-9, .absolute = 1e-9};

at::Tensor full(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  return DTensor(tensor).full_tensor();
}

/// Two layers, on one device and on a mesh.
struct Pair {
  explicit Pair(const DeviceMesh& mesh) {
    for (uint64_t i = 0; i < 3; ++i) {
      whole.push_back(values_of('g', sizes[i], i + 1).requires_grad_());
      parts.push_back(distribute_tensor(whole.back(), mesh, {placements[i]}));
    }
    input = values_of('g', {4, 3}, 9);
    input_parts = distribute_tensor(input, mesh, {Replicate()});
  }

  static at::Tensor forward(const at::Tensor& x, const std::vector<at::Tensor>& weights) {
    return at::linear(at::gelu(at::linear(x, weights[0], weights[1])), weights[2]);
  }
  at::Tensor loss() const { return forward(input, whole).pow(2).mean(); }
  at::Tensor loss_of_parts() const { return forward(input_parts, parts).pow(2).mean(); }

  void check_weights() const {
    for (std::size_t i = 0; i < whole.size(); ++i) check_equal("weight", full(parts[i]), whole[i].detach(), kClose);
  }

  const std::vector<Sizes> sizes = {{5, 3}, {5}, {2, 5}};
  const Placements placements = {Shard(0), Shard(0), Shard(1)};
  std::vector<at::Tensor> whole;
  std::vector<at::Tensor> parts;
  at::Tensor input;
  at::Tensor input_parts;
};

template <class Optimizer, class Options>
void check_training(const DeviceMesh& mesh, const Options& options, bool clips = false) {
  const Pair pair(mesh);
  Optimizer one(pair.whole, options);
  Optimizer several(pair.parts, options);
  for (int step = 0; step < 3; ++step) {
    one.zero_grad(/*set_to_none=*/step == 1);
    several.zero_grad(/*set_to_none=*/step == 1);
    const auto expected = pair.loss();
    const auto actual = pair.loss_of_parts();
    check_equal("loss", full(actual), expected.detach(), kClose);
    expected.backward();
    actual.backward();
    if (clips) {
      const auto norm = torch::nn::utils::clip_grad_norm_(pair.whole, 0.05);
      EXPECT_NEAR(torch::nn::utils::clip_grad_norm_(pair.parts, 0.05), norm, 1e-9);
    }
    one.step();
    several.step();
    pair.check_weights();
  }
}

// TP-18: libtorch's optimizers on leaves that are DTensors
LOCKSTEP_THREAD_TEST(DTensorTraining, OptimizersOfLibtorch, 2) {
  const auto mesh = line(world);
  check_training<torch::optim::SGD>(mesh, torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.01));
  check_training<torch::optim::AdamW>(mesh, torch::optim::AdamWOptions(0.1).amsgrad(true));
  check_training<torch::optim::Adam>(mesh, torch::optim::AdamOptions(0.1).weight_decay(0.1));
  check_training<torch::optim::RMSprop>(mesh, torch::optim::RMSpropOptions(0.1).momentum(0.5));
  check_training<torch::optim::Adagrad>(mesh, torch::optim::AdagradOptions(0.1));
}

// TP-18: uneven parts, and an empty one
LOCKSTEP_THREAD_TEST(DTensorTraining, OptimizersOnThreeRanks, 3) {
  check_training<torch::optim::AdamW>(line(world), torch::optim::AdamWOptions(0.1));
}

// TP-18: this library's optimizers, by fused kernels and by operators on lists
LOCKSTEP_THREAD_TEST(DTensorTraining, OptimizersOfThisLibrary, 3) {
  const auto mesh = line(world);
  check_training<optim::AdamW>(mesh, optim::AdamWOptions{.lr = 0.1, .amsgrad = true});
  check_training<optim::Adam>(mesh, optim::AdamOptions{.lr = 0.1, .weight_decay = 0.1});
  check_training<optim::SGD>(mesh, optim::SGDOptions{.lr = 0.1, .momentum = 0.9});
  check_training<optim::Adagrad>(mesh, optim::AdagradOptions{.lr = 0.1});
  check_training<optim::Adadelta>(mesh, optim::AdadeltaOptions{.lr = 0.1});
  check_training<optim::Adamax>(mesh, optim::AdamaxOptions{.lr = 0.1});
  check_training<optim::RMSprop>(mesh, optim::RMSpropOptions{.lr = 0.1, .momentum = 0.5});
  check_training<optim::Rprop>(mesh, optim::RpropOptions{.lr = 0.1});
}

// TP-55: libtorch's own clipping
LOCKSTEP_THREAD_TEST(DTensorTraining, ClippingOfLibtorch, 3) {
  check_training<torch::optim::SGD>(line(world), torch::optim::SGDOptions(0.1), /*clips=*/true);
}

// TP-18: gradients of several backward passes add up, whatever their placements
LOCKSTEP_THREAD_TEST(DTensorTraining, GradientsAccumulate, 2) {
  const auto mesh = line(world);
  const Sizes sizes = {5, 3};
  const auto whole = values_of('g', sizes, 1).requires_grad_();
  for (const auto& placements : dtensor_cases::layouts_of(mesh, 'g', sizes)) {
    whole.mutable_grad() = at::Tensor();
    const auto tensor = distributed(whole, Layout(mesh, placements, sizes)).requires_grad_();
    for (const auto& of_gradient : dtensor_cases::layouts_of(mesh, 'g', sizes)) {
      if (of_gradient.front() == Placement(Partial(ReduceOp::MAX))) continue;
      const auto gradient = values_of('g', sizes, 3);
      (whole * 2).backward(gradient);
      (tensor * 2).backward(distributed(gradient, Layout(mesh, of_gradient, sizes)));
      check_equal("gradient", full(tensor.grad()), whole.grad(), kClose);
    }
  }
}

// TP-32: autograd::grad, twice
LOCKSTEP_THREAD_TEST(DTensorTraining, IsDifferentiatedTwice, 2) {
  const auto mesh = line(world);
  const auto check = [&](const Pair& pair) {
    const auto penalty = [](const at::Tensor& loss, const std::vector<at::Tensor>& weights) {
      const auto gradients = torch::autograd::grad({loss}, weights, {}, std::nullopt, /*create_graph=*/true);
      auto sum = gradients[0].pow(2).sum();
      for (std::size_t i = 1; i < gradients.size(); ++i) sum = sum + gradients[i].pow(2).sum();
      return sum;
    };
    penalty(pair.loss(), pair.whole).backward();
    penalty(pair.loss_of_parts(), pair.parts).backward();
    for (std::size_t i = 0; i < pair.whole.size(); ++i) {
      check_equal("second derivative", full(pair.parts[i].grad()), pair.whole[i].grad(), kClose);
    }
  };
  check(Pair(mesh));
}

// TP-18: hooks see DTensors, retain_grad keeps one
LOCKSTEP_THREAD_TEST(DTensorTraining, HooksAndRetainedGradients, 2) {
  const auto mesh = line(world);
  const Pair pair(mesh);
  const auto run = [](const at::Tensor& x, const at::Tensor& w) {
    auto hidden = at::linear(x, w);
    hidden.retain_grad();
    hidden.register_hook([](const at::Tensor& gradient) { return gradient * 3; });
    hidden.pow(2).sum().backward();
    return hidden.grad();
  };
  int seen = 0;
  pair.parts[0].register_hook([&](const at::Tensor& gradient) { seen += is_dtensor(gradient) ? 1 : 100; });
  const auto expected = run(pair.input, pair.whole[0]);
  const auto actual = run(pair.input_parts, pair.parts[0]);
  EXPECT_EQ(seen, 1);
  check_equal("retained", full(actual), expected, kClose);
  check_equal("weight", full(pair.parts[0].grad()), pair.whole[0].grad(), kClose);
}

// TP-18: detach_, requires_grad_, set_data, variable_data
LOCKSTEP_THREAD_TEST(DTensorTraining, HandlesAreTensors, 2) {
  const auto mesh = line(world);
  const auto whole = values_of('g', {5, 3}, 1);
  const auto tensor = distribute_tensor(whole, mesh, {Shard(0)}).tensor();
  auto scaled = (tensor.detach().requires_grad_() * 2).clone();
  EXPECT_TRUE(scaled.requires_grad());
  scaled.detach_();
  EXPECT_FALSE(scaled.requires_grad());
  check_equal("detached", full(scaled), whole * 2);
  auto leaf = tensor.detach().clone().requires_grad_();
  leaf.set_data(scaled);
  check_equal("data", full(leaf.detach()), whole * 2);
  leaf.set_data(DTensor(scaled).redistribute({Shard(1)}).tensor());
  EXPECT_EQ(DTensor(leaf).placements(), (Placements{Shard(1)}));
  (leaf * leaf).sum().backward();
  check_equal("gradient", full(leaf.grad()), whole * 4);
  expect_error([&] { leaf.set_data(whole); }, {"ordinary tensor"});
  EXPECT_TRUE(is_dtensor(leaf.variable_data()));
  EXPECT_TRUE(is_dtensor(leaf.tensor_data()));
  // A write through a handle is a write to the local tensor, and counts.
  const auto local = DTensor(tensor).to_local();
  const auto version = local._version();
  tensor.mul_(2);
  EXPECT_EQ(local._version(), version + 1);
  check_equal("through the handle", local, Layout(mesh, {Shard(0)}, {5, 3}).cut(whole * 2).contiguous());
}

// TP-18: what was saved for a backward pass and written since is noticed
LOCKSTEP_THREAD_TEST(DTensorTraining, WritesToSavedTensorsAreNoticed, 2) {
  const auto mesh = line(world);
  const auto x = distribute_tensor(values_of('g', {4, 3}, 1).requires_grad_(), mesh, {Shard(0)}).tensor();
  auto hidden = x * 2;
  const auto squares = hidden * hidden;
  hidden.add_(1);
  expect_error([&] { squares.sum().backward(); }, {"modified by an inplace operation"});
}

// TP-18: InferenceMode and NoGradGuard
LOCKSTEP_THREAD_TEST(DTensorTraining, WithoutAutograd, 2) {
  const auto mesh = line(world);
  const Pair pair(mesh);
  {
    const at::NoGradGuard no_grad;
    check_equal("no grad", full(pair.loss_of_parts()), pair.loss(), kClose);
  }
  const c10::InferenceMode inference;
  const auto x = distribute_tensor(values_of('g', {4, 3}, 9), mesh, {Shard(0)}).tensor();
  EXPECT_TRUE(x.is_inference());
  const auto actual = Pair::forward(x, pair.parts);
  check_equal("inference", full(actual), Pair::forward(pair.input, pair.whole), kClose);
  auto written = actual.clone();
  written.add_(actual).mul_(2);
  check_equal("written", full(written), Pair::forward(pair.input, pair.whole) * 4, kClose);
}

// TP-18: autocast casts DTensors as it casts others
LOCKSTEP_THREAD_TEST(DTensorTraining, Autocast, 2) {
  const auto mesh = line(world);
  const auto x = values_of('g', {4, 3}, 9).to(at::kFloat);
  const auto w = values_of('g', {6, 3}, 1).to(at::kFloat).requires_grad_();
  const auto w_parts = distribute_tensor(w, mesh, {Shard(0)}).tensor();
  const auto x_parts = distribute_tensor(x, mesh, {Replicate()}).tensor();
  at::autocast::set_autocast_enabled(at::kCPU, true);
  at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
  at::autocast::increment_nesting();
  const auto expected = at::linear(x, w);
  const auto actual = at::linear(x_parts, w_parts);
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(at::kCPU, false);
  EXPECT_EQ(actual.scalar_type(), at::kBFloat16);
  check_equal("autocast", full(actual), expected.detach());
  expected.to(at::kFloat).pow(2).sum().backward();
  actual.to(at::kFloat).pow(2).sum().backward();
  EXPECT_EQ(w_parts.grad().scalar_type(), at::kFloat);
  check_equal("gradient", full(w_parts.grad()), w.grad(), {.relative = 1e-2, .absolute = 1e-2});
}

// TP-18: a checkpointed region of DTensors runs again
LOCKSTEP_THREAD_TEST(DTensorTraining, Checkpointing, 2) {
  const auto mesh = line(world);
  const Pair pair(mesh);
  pair.loss().backward();
  const auto out = checkpoint([&](const at::Tensor& x) { return Pair::forward(x, pair.parts); }, pair.input_parts);
  out.pow(2).mean().backward();
  for (std::size_t i = 0; i < pair.whole.size(); ++i) {
    check_equal("gradient", full(pair.parts[i].grad()), pair.whole[i].grad(), kClose);
  }
}

// TP-6: ranks outside of the mesh go along, and hold nothing
LOCKSTEP_THREAD_TEST(DTensorTraining, RanksOutsideOfTheMesh, 3) {
  const auto mesh = init_device_mesh("cpu", {2});
  const Pair pair(mesh);
  pair.loss().backward();
  auto loss = pair.loss_of_parts();
  loss.backward();
  const auto compared = pair.parts[0] > 0;
  EXPECT_EQ(compared.scalar_type(), at::kBool);
  EXPECT_EQ(pair.parts[0].split(2, 1).size(), 2U);
  for (std::size_t i = 0; i < pair.whole.size(); ++i) {
    ASSERT_TRUE(pair.parts[i].grad().defined());
    const auto gradient = full(pair.parts[i].grad());
    if (mesh.is_member()) {
      check_equal("gradient", gradient, pair.whole[i].grad(), kClose);
    } else {
      EXPECT_EQ(gradient.numel(), 0);
    }
  }
}

// TP-18: a replica that is multiplied by terms in place stays one
LOCKSTEP_THREAD_TEST(DTensorTraining, FactorsOfTermsAreWholeInPlace, 2) {
  const auto mesh = line(world);
  const auto whole = values_of('g', {4, 3}, 1);
  const auto terms = distributed(whole, Layout(mesh, {Partial()}, {4, 3}));
  auto replica = distribute_tensor(whole, mesh, {Replicate()}).tensor().clone();
  replica.mul_(terms);
  EXPECT_EQ(DTensor(replica).placements(), (Placements{Replicate()}));
  check_equal("on this rank", DTensor(replica).to_local(), whole * whole, kClose);
}

}  // namespace
}  // namespace lockstep::training_test
