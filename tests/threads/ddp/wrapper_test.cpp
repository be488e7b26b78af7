// The wrapper as an object: how it is called, and what happens when its module changes.
#include "tests/support/ddp_models.h"

namespace lockstep::wrapper_test {
namespace {

using namespace ddp_models;

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
LOCKSTEP_THREAD_TEST(DdpWrapper, WarnsOnceOfParametersItDoesNotKnow, 2) {
  const auto step = [](auto& ddp) { ddp(at::ones({1, 4})).sum().backward(); };
  {
    const Warnings warnings;
    auto model = mlp(kSizes);
    model->layers[0]->weight.requires_grad_(false);
    DistributedDataParallel ddp(model, world.group());
    for (int i = 0; i < 6; ++i) step(ddp);
    EXPECT_EQ(warnings.count("after it was wrapped"), 0);
    model->layers[0]->weight.requires_grad_(true);
    for (int i = 0; i < 3; ++i) step(ddp);
    EXPECT_EQ(warnings.count("after it was wrapped: 'layer0.weight'. "), 1);
    EXPECT_EQ(warnings.count("after it was wrapped"), 1);
  }
  {
    const Warnings warnings;
    DistributedDataParallel ddp(Growing(), world.group());
    for (int i = 0; i < 5; ++i) step(ddp);
    EXPECT_EQ(warnings.count("after it was wrapped: 'late.weight', 'late.bias'. "), 1);
    EXPECT_EQ(warnings.count("after it was wrapped"), 1);
  }
  {
    const Warnings warnings;
    auto model = mlp(kSizes);
    DistributedDataParallel ddp(model, world.group(), {.find_unused_parameters = true});
    step(ddp);
    model->layers[1] = model->replace_module("layer1", torch::nn::Linear(5, 2));
    for (int i = 0; i < 5; ++i) step(ddp);
    EXPECT_EQ(warnings.count("after it was wrapped: 'layer1.weight', 'layer1.bias'. "), 1);
  }
}

}  // namespace
}  // namespace lockstep::wrapper_test
