// What one training step does: gradients are those of one process with the whole batch.
#include "tests/ddp_models.h"

namespace lockstep {
namespace {

using namespace ddp_models;

class DdpStep : public ::testing::TestWithParam<int> {};

/// Gradients of one process that has the whole batch.
std::vector<at::Tensor> reference(const std::vector<int64_t>& sizes, const at::Tensor& batch) {
  auto model = mlp(sizes);
  model->forward(batch).pow(2).mean().backward();
  return gradients_of(*model);
}

// DDP-36, DDP-39
TEST_P(DdpStep, GivesTheGradientsOfTheWholeBatch) {
  const auto batch = random_batch(12, 6, 3);
  const auto expected = reference({6, 5, 3}, batch);
  testing::run_threads_in_gtest({.world_size = GetParam()}, [&](const World& world) {
    for (const bool as_view : {false, true}) {
      for (const bool batched : {false, true}) {
        DistributedDataParallel ddp(mlp({6, 5, 3}), world.group(),
                                    {.gradient_as_bucket_view = as_view, .batched_grad_copy = batched});
        for (int step = 0; step < 4; ++step) {
          zero_grads(ddp);
          ddp(my_rows(batch, world)).pow(2).mean().backward();
          expect_close(gradients_of(ddp), expected);
        }
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, DdpStep, ::testing::Values(1, 2, 3, 4));

}  // namespace
}  // namespace lockstep
