// The wrapper as an object: how it is called, what happens when its module changes or it is gone, and two wrappers that
// share a part.
#include <torch/optim/adam.h>
#include <torch/serialize.h>

#include <sstream>

#include "tests/support/ddp_models.h"

namespace lockstep::wrapper_test {
namespace {

using namespace ddp_models;
using testing::expect_error;
using testing::Recorder;

const std::vector<int64_t> kSizes = {4, 5, 2};

at::Tensor loss_of(const at::Tensor& output) {
  return output.pow(2).mean();
}

// never past the wrapper.
LOCKSTEP_THREAD_TEST(DdpWrapper, IsCalledThroughAnArrowAsHoldersAre, 2) {
  const Warnings warnings;
  const auto batch = random_batch(6, 4, 3);
  auto model = mlp(kSizes);
  loss_of(model->forward(batch)).backward();
  DistributedDataParallel ddp(mlp(kSizes), world.group());
  static_assert(std::is_same_v<decltype(ddp.operator->()), DistributedDataParallel<Mlp>*>);
  static_assert(std::is_same_v<decltype(std::as_const(ddp).operator->()), const DistributedDataParallel<Mlp>*>);
  for (int step = 0; step < 3; ++step) {
    ddp->zero_grad();
    loss_of(ddp->forward(my_rows(batch, world))).backward();
    expect_close(gradients_of(ddp), gradients_of(*model));
  }
  EXPECT_EQ(ddp->named_parameters().keys()[0], "module.layer0.weight");
  ddp->eval();
  EXPECT_FALSE(ddp.module()->is_training());
  EXPECT_EQ(warnings.count("not averaged"), 0);
}

/// Has a second layer from the first forward on.
struct GrowingImpl : torch::nn::Module {
  GrowingImpl() : first(register_module("first", torch::nn::Linear(4, 4))) {}
  at::Tensor forward(const at::Tensor& input) {
    if (!late) late = register_module("late", torch::nn::Linear(4, 2));
    return late->forward(first->forward(input));
  }
  torch::nn::Linear first;
  torch::nn::Linear late = nullptr;
};
TORCH_MODULE(Growing);

// unfrozen, made in the first forward, replaced.
LOCKSTEP_THREAD_TEST(DdpWrapper, RefusesParametersItDoesNotKnow, 2) {
  const auto step = [](auto& ddp) { ddp(at::ones({1, 4})).sum().backward(); };
  const auto expect_refused = [&](auto& ddp, const std::string& names) {
    for (int i = 0; i < 2; ++i) expect_error([&] { step(ddp); }, {"after it was wrapped: " + names + ". ", "again"});
    const torch::NoGradGuard no_grad;
    ddp(at::ones({1, 4}));  // an evaluation has nothing to average
  };
  {
    auto model = mlp(kSizes);
    model->layers[0]->weight.requires_grad_(false);
    DistributedDataParallel ddp(model, world.group());
    for (int i = 0; i < 6; ++i) step(ddp);
    model->layers[0]->weight.requires_grad_(true);
    expect_refused(ddp, "'layer0.weight'");
  }
  {
    DistributedDataParallel ddp(Growing(), world.group());
    step(ddp);
    expect_refused(ddp, "'late.weight', 'late.bias'");
  }
  {
    auto model = mlp(kSizes);
    DistributedDataParallel ddp(model, world.group(), {.find_unused_parameters = true});
    step(ddp);
    model->layers[1] = model->replace_module("layer1", torch::nn::Linear(5, 2));
    expect_refused(ddp, "'layer1.weight', 'layer1.bias'");
  }
  // However late.
  {
    auto model = mlp(kSizes);
    DistributedDataParallel ddp(model, world.group(), {.find_unused_parameters = true});
    for (int i = 0; i < 4; ++i) step(ddp);
    model->layers[1] = model->replace_module("layer1", torch::nn::Linear(5, 2));
    expect_refused(ddp, "'layer1.weight', 'layer1.bias'");
  }
  {
    auto model = mlp(kSizes);
    DistributedDataParallel ddp(model, world.group());
    for (int i = 0; i < 4; ++i) step(ddp);
    model->layers.push_back(model->register_module("layer2", torch::nn::Linear(2, 2)));
    expect_refused(ddp, "'layer2.weight', 'layer2.bias'");
  }
}

// what is no parameter to average may change.
LOCKSTEP_THREAD_TEST(DdpWrapper, LayersWithoutNewParametersMayComeAndGo, 2) {
  auto model = mlp(kSizes);
  DistributedDataParallel ddp(model, world.group(), {.find_unused_parameters = true});
  const auto step = [&] { ddp(at::ones({1, 4})).sum().backward(); };
  step();
  model->register_module("dropout", torch::nn::Dropout());
  step();
  auto frozen = model->register_module("frozen", torch::nn::Linear(2, 2));
  for (auto& parameter : frozen->parameters()) parameter.requires_grad_(false);
  step();
  model->unregister_module("frozen");
  step();
  frozen->weight.requires_grad_(true);
  model->register_module("frozen", frozen);
  expect_error(step, {"'frozen.weight'", "after it was wrapped"});
}

// in the first forward, before anything is trained on gradients of one rank.
LOCKSTEP_THREAD_TEST(DdpWrapper, NamesLayersThatWereFrozen, 2) {
  for (const auto& options : std::vector<DdpOptions>{{}, {.static_graph = true}, {.gradient_as_bucket_view = true}}) {
    DistributedDataParallel ddp(mlp(kSizes), world.group(), options);
    auto& weight = ddp.module()->layers[0]->weight;
    const auto step = [&] { ddp(at::ones({1, 4})).sum().backward(); };
    step();
    weight.requires_grad_(false);
    for (int i = 0; i < 2; ++i) expect_error(step, {"'layer0.weight'", "(0)", "frozen", "wrap it again"});
    {
      const torch::NoGradGuard no_grad;
      ddp(at::ones({1, 4}));
    }
    weight.requires_grad_(true);
    step();
  }
}

// what the next reduction does not wait for.
LOCKSTEP_THREAD_TEST(DdpWrapper, MayHaveFrozenLayersThatNothingWaitsFor, 2) {
  const auto input = at::ones({1, 4});
  {
    DistributedDataParallel ddp(mlp(kSizes), world.group(), {.find_unused_parameters = true});
    ddp.module()->layers[0]->weight.requires_grad_(false);
    for (int i = 0; i < 2; ++i) ddp(input).sum().backward();
  }
  {
    // Frozen before it counts.
    DistributedDataParallel ddp(mlp(kSizes), world.group(), {.static_graph = true});
    ddp.module()->layers[0]->weight.requires_grad_(false);
    for (int i = 0; i < 3; ++i) ddp(input).sum().backward();
  }
  {
    // A discriminator, while the generator is trained through it.
    DistributedDataParallel ddp(mlp(kSizes), world.group());
    for (int i = 0; i < 2; ++i) {
      for (auto& parameter : ddp.parameters()) parameter.requires_grad_(false);
      const auto made = at::ones({1, 4}).requires_grad_();
      ddp(made).sum().backward();
      EXPECT_TRUE(made.grad().defined());
      for (auto& parameter : ddp.parameters()) parameter.requires_grad_(true);
      zero_grads(ddp);
      ddp(input * (world.rank() + 1)).sum().backward();
      testing::check_equal("average", ddp.module()->layers[1]->bias.grad(), at::ones({2}));
    }
  }
}

// U-3: state of an optimizer that only one rank has loaded.
LOCKSTEP_THREAD_TEST(DdpWrapper, NoticesReplicasThatDriftApart, 2) {
  const auto train = [](auto& model, auto& optimizer, const at::Tensor& batch) {
    optimizer.zero_grad();
    loss_of(model(batch)).backward();
    optimizer.step();
  };
  auto twin = mlp(kSizes);
  torch::optim::Adam trained(twin->parameters(), torch::optim::AdamOptions(0.1));
  for (int step = 0; step < 3; ++step) train(twin, trained, random_batch(4, 4, step));
  std::stringstream file;
  torch::save(trained, file);

  for (const bool is_loaded_by_all : {false, true}) {
    auto model = mlp(kSizes);
    DistributedDataParallel ddp(model, world.group());
    torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(0.1));
    file.clear();
    file.seekg(0);
    if (is_loaded_by_all || world.rank() == 0) torch::load(optimizer, file);
    train(ddp, optimizer, random_batch(4, 4, world.rank()));
    if (is_loaded_by_all) {
      Recorder recorder;
      for (int step = 1; step < 20; ++step) train(ddp, optimizer, random_batch(4, 4, step));
      // Compared in steps 2, 3, 5 and 9.
      testing::expect_count(recorder.events("launch"), "all_reduce", 19 + 4);
    } else {
      expect_error([&] { train(ddp, optimizer, random_batch(4, 4, 5)); },
                   {"replicas differ", "'layer0.weight'", "loaded the optimizer's state"});
    }
  }
}

// U-3: and if they were the same when they were first compared.
LOCKSTEP_THREAD_TEST(DdpWrapper, NoticesReplicasThatDriftApartLater, 2) {
  auto model = mlp(kSizes);
  DistributedDataParallel ddp(model, world.group());
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
  const auto train = [&](int step) {
    optimizer.zero_grad();
    loss_of(ddp(random_batch(4, 4, 10 * world.rank() + step))).backward();
    optimizer.step();
  };
  for (int step = 1; step <= 3; ++step) train(step);
  if (world.rank() == 0) static_cast<torch::optim::SGDOptions&>(optimizer.param_groups()[0].options()).lr(0.5);
  train(4);
  expect_error([&] { train(5); }, {"replicas differ", "'layer0.weight'"});
}

// U-3: sharpness-aware minimization moves parameters on each rank by itself, and back before the step.
LOCKSTEP_THREAD_TEST(DdpWrapper, ReplicasMayDifferBetweenALocalForwardAndTheStep, 2) {
  auto model = mlp(kSizes);
  DistributedDataParallel ddp(model, world.group());
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
  for (int step = 0; step < 10; ++step) {
    const auto batch = random_batch(4, 4, 10 * world.rank() + step);
    optimizer.zero_grad();
    {
      const auto guard = ddp.no_sync();
      loss_of(ddp(batch)).backward();
    }
    std::vector<at::Tensor> moves;
    const auto move = [&](double sign) {
      const at::NoGradGuard no_grad;
      for (std::size_t i = 0; i < moves.size(); ++i) model->parameters()[i].add_(moves[i], sign);
    };
    for (const auto& parameter : model->parameters()) moves.push_back(parameter.grad() * 0.05);
    move(1);
    optimizer.zero_grad();
    loss_of(ddp(batch)).backward();
    move(-1);
    optimizer.step();
  }
}

// U-3: where they differ on purpose nothing is said.
LOCKSTEP_THREAD_TEST(DdpWrapper, ReplicasMayDifferBehindAHookOrWhereIgnored, 2) {
  const Warnings warnings;
  DistributedDataParallel local(mlp(kSizes), world.group());
  local.register_comm_hook([](GradBucket& bucket) { return completed_future(bucket.buffer()); });
  auto partly = mlp(kSizes);
  DistributedDataParallel ignoring(partly, world.group(), {.params_and_buffers_to_ignore = {"layer0.weight"}});
  torch::optim::SGD of_local(local.parameters(), 0.1);
  torch::optim::SGD of_ignoring({partly->layers[0]->weight}, 0.1);
  for (int step = 0; step < 6; ++step) {
    loss_of(local(random_batch(2, 4, 10 * world.rank() + step))).backward();
    of_local.step();
    loss_of(ignoring(random_batch(2, 4, 10 * world.rank() + step))).backward();
    of_ignoring.step();
  }
  EXPECT_EQ(warnings.count("replicas differ"), 0);
}

// DDP-77, A-10: whatever the mode.
LOCKSTEP_THREAD_TEST(DdpWrapper, ThatIsGoneBeforeBackwardIsSaidSo, 2) {
  for (const auto& options : std::vector<DdpOptions>{{}, {.find_unused_parameters = true}, {.static_graph = true}}) {
    const Warnings quiet;
    auto model = mlp(kSizes);
    const auto input = at::ones({1, 4}).requires_grad_();
    at::Tensor synced;
    at::Tensor local;
    {
      DistributedDataParallel ddp(model, world.group(), options);
      synced = ddp(input).sum();
      const auto guard = ddp.no_sync();
      local = ddp(input).sum();
    }
    expect_error([&] { synced.backward({}, /*retain_graph=*/true); }, {"destroyed", "Keep the wrapper"});
    for (const auto& gradient : gradients_of(*model)) EXPECT_FALSE(gradient.defined());
    // These were to stay on this rank.
    torch::autograd::grad({synced}, {input}, {}, /*retain_graph=*/true);
    local.backward();
    EXPECT_TRUE(model->layers[0]->weight.grad().defined());
  }
}

struct HeadedImpl : torch::nn::Module {
  explicit HeadedImpl(const Mlp& shared)
      : encoder(register_module("encoder", shared)), head(register_module("head", torch::nn::Linear(2, 1))) {
    const at::NoGradGuard no_grad;
    for (auto& parameter : head->parameters()) parameter.fill_(0.5);
  }
  at::Tensor forward(const at::Tensor& input) { return head->forward(at::tanh(encoder->forward(input))); }
  Mlp encoder;
  torch::nn::Linear head;
};
TORCH_MODULE(Headed);

// two tasks, an encoder in common, a wrapper each.
LOCKSTEP_THREAD_TEST(DdpWrapper, MayShareAnEncoderWithAnother, 2) {
  const Warnings warnings;
  const auto rows = [](int rank, int number) { return random_batch(3, 4, static_cast<uint64_t>(10 * rank + number)); };
  auto encoder = mlp(kSizes);
  Headed one(encoder);
  Headed other(encoder);
  at::Tensor sum = at::zeros({});
  for (int rank = 0; rank < 2; ++rank) {
    sum = sum + loss_of(one->forward(rows(rank, 0))) + loss_of(other->forward(rows(rank, 1)));
  }
  (sum / 2).backward();
  auto expected = gradients_of(*one);
  for (const auto& gradient : gradients_of(*other->head)) expected.push_back(gradient);

  for (const auto& options : std::vector<DdpOptions>{{}, {.find_unused_parameters = true}}) {
    DistributedDataParallel first(one, world.group(), options);
    DistributedDataParallel second(other, world.group(), options);
    const auto run_first = [&] { return loss_of(first(rows(world.rank(), 0))); };
    const auto run_second = [&] { return loss_of(second(rows(world.rank(), 1))); };
    const auto expect_both = [&] {
      auto actual = gradients_of(*one);
      for (const auto& gradient : gradients_of(*other->head)) actual.push_back(gradient);
      expect_close(actual, expected);
      zero_grads(*one);
      zero_grads(*other);
    };
    zero_grads(*one);
    zero_grads(*other);
    for (int step = 0; step < 3; ++step) {
      run_first().backward();
      run_second().backward();
      expect_both();
      const auto early = run_first();
      const auto late = run_second();
      early.backward();
      late.backward();
      expect_both();
      (run_first() + run_second()).backward();
      expect_both();
    }
  }
  EXPECT_EQ(warnings.count("not averaged"), 0);
}

}  // namespace
}  // namespace lockstep::wrapper_test
