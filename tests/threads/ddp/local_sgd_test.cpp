// Post-local SGD as docs/ddp.md has it: the comm hook and the optimizer together.
#include "tests/support/ddp_models.h"

namespace lockstep {
namespace {

using namespace ddp_models;

/// Whether all ranks have the same parameters, to the bit.
bool is_one_model(const torch::nn::Module& model, const World& world) {
  for (const auto& param : model.parameters()) {
    const auto highest = param.detach().clone();
    const auto lowest = param.detach().clone();
    all_reduce(highest, world.group(), ReduceOp::MAX);
    all_reduce(lowest, world.group(), ReduceOp::MIN);
    if (!at::equal(highest, lowest)) return false;
  }
  return true;
}

// DDP-73: one model in the warm-up, models of each rank's own afterwards that become one in every second step
LOCKSTEP_THREAD_TEST(LocalSgd, HookAndOptimizerSwitchTogether, 3) {
  constexpr int64_t kWarmUp = 3;
  DistributedDataParallel ddp(mlp({4, 6, 2}), world.group());
  ddp.register_comm_hook(post_local_sgd_hook(std::make_shared<PostLocalSGDState>(
      PostLocalSGDOptions{.start_local_sgd_iter = kWarmUp, .post_local_gradient_allreduce = false})));
  PostLocalSGDOptimizer optimizer(
      std::make_unique<optim::SGD>(ddp.parameters(), optim::SGDOptions{.lr = 0.1, .momentum = 0.9}),
      std::make_shared<PeriodicModelAverager>(/*period=*/2, /*warmup_steps=*/kWarmUp));
  std::vector<bool> is_one;
  for (int step = 0; step < 8; ++step) {
    optimizer.zero_grad();
    const auto batch = random_batch(5, 4, static_cast<uint64_t>(10 * step + world.rank()));
    ddp(batch).pow(2).mean().backward();
    optimizer.step();
    is_one.push_back(is_one_model(ddp, world));
  }
  EXPECT_EQ(is_one, (std::vector<bool>{true, true, true, true, false, true, false, true}));
}

}  // namespace
}  // namespace lockstep
