// A backward of distributed autograd, each process with a context of its own: gradients stay in it, and are averaged
// there.
#include <torch/csrc/distributed/autograd/context/container.h>
#include <torch/csrc/distributed/autograd/context/context.h>
#include <torch/csrc/distributed/autograd/engine/dist_engine.h>

#include "tests/support/ddp_models.h"

namespace lockstep {
namespace {

using namespace ddp_models;
using torch::distributed::autograd::DistAutogradContainer;
using torch::distributed::autograd::DistEngine;

class DdpDistAutograd : public ::testing::TestWithParam<int> {};

// DDP-99
TEST_P(DdpDistAutograd, AveragesGradientsInTheContext) {
  testing::run_processes_in_gtest({.world_size = GetParam(), .backend = "shm"}, [](const World& world) {
    auto& container = DistAutogradContainer::init(world.rank());
    for (const bool searches : {false, true}) {
      DistributedDataParallel ddp(mlp({4, 3, 2}), world.group(), {.find_unused_parameters = searches});
      const auto batch = random_batch(12, 4, 5);
      auto reference = mlp({4, 3, 2});
      reference->forward(batch).pow(2).mean().backward();
      for (int step = 0; step < 3; ++step) {
        const auto context = container.newContext();
        const auto loss = ddp(my_rows(batch, world)).pow(2).mean();
        DistEngine::getInstance().execute(context->contextId(), {loss}, /*retainGraph=*/false);
        const auto gradients = context->getGradients();
        const auto expected = gradients_of(*reference);
        for (std::size_t i = 0; i < expected.size(); ++i) {
          const auto parameter = ddp.parameters()[i];
          EXPECT_FALSE(parameter.grad().defined()) << "gradients belong to the context";
          EXPECT_TRUE(at::allclose(gradients.at(parameter), expected[i], 1e-5, 1e-5));
        }
        container.releaseContext(context->contextId());
      }
      // An ordinary backward afterwards is an ordinary one.
      zero_grads(ddp);
      ddp(my_rows(batch, world)).pow(2).mean().backward();
      expect_close(gradients_of(ddp), gradients_of(*reference));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, DdpDistAutograd, ::testing::Values(1, 2));

}  // namespace
}  // namespace lockstep
