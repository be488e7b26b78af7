// Modules that were built without memory, under DDP.
#include "lockstep/intercept/deferred_init.h"
#include "tests/support/ddp_models.h"

namespace lockstep::deferred_build_test {
namespace {

using namespace ddp_models;
using testing::check_equal;
using testing::expect_error;

LOCKSTEP_PROCESS_TEST(DeferredBuild, TrainsAsAnOrdinaryOne, 2) {
  const auto make = [] { return torch::nn::Linear(4, 2); };
  torch::manual_seed(5);
  auto reference = make();
  torch::manual_seed(5);
  auto net = deferred_init(make);
  // On every rank, so that none waits for another.
  expect_error([&] { DistributedDataParallel ddp(net, world.group()); }, {"'weight'", "materialize_module()"});
  materialize_module(*net);
  DistributedDataParallel ddp(net, world.group());
  const auto batch = random_batch(6, 4, 5);
  for (int step = 0; step < 2; ++step) {
    ddp(my_rows(batch, world)).pow(2).mean().backward();
    reference->forward(batch).pow(2).mean().backward();
    const torch::NoGradGuard no_grad;
    for (std::size_t i = 0; i < 2; ++i) {
      for (const auto& module : {net, reference}) {
        auto parameter = module->parameters()[i];
        parameter.sub_(parameter.grad(), 0.1);
        parameter.mutable_grad().reset();
      }
      check_equal("parameter", net->parameters()[i], reference->parameters()[i], {1e-6, 1e-6});
    }
  }
}

}  // namespace
}  // namespace lockstep::deferred_build_test
