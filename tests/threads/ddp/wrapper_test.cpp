// The wrapper as an object: how it is called.
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

}  // namespace
}  // namespace lockstep::wrapper_test
