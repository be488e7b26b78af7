// The smallest data-parallel training loop: every rank has the model and a part of the data.
//   lockstep-run -n 2 build/examples/ddp_minimal
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdio>
#include <exception>

namespace {

/// Learns y = sin(x) from points that no other rank has. Returns whether it did.
bool train(const lockstep::World& world) {
  // Ranks may begin with different weights: the wrapper gives all of them rank 0's.
  torch::nn::Sequential net(torch::nn::Linear(1, 64), torch::nn::Tanh(), torch::nn::Linear(64, 1));
  net->to(world.device());
  lockstep::DistributedDataParallel ddp(net, world.group());
  torch::optim::AdamW optimizer(ddp.parameters(), 1e-2);

  torch::manual_seed(100 + world.rank());
  double first_loss = 0;
  double loss = 0;
  for (int step = 1; step <= 300; ++step) {
    const auto x = (torch::rand({32, 1}, world.device()) * 2 - 1) * M_PI;
    optimizer.zero_grad();
    const auto error = torch::mse_loss(ddp(x), torch::sin(x));
    error.backward();  // on return every rank has the mean of all ranks' gradients
    optimizer.step();

    auto mean = error.detach().clone();
    lockstep::all_reduce(mean, world.group(), lockstep::ReduceOp::AVG);
    loss = mean.item<double>();
    if (step == 1) first_loss = loss;
    if (world.rank() == 0 && (step == 1 || step % 50 == 0)) std::printf("step %3d: loss %.5f\n", step, loss);
  }

  // The same bits everywhere: ranks began alike and took the same steps. Throws if not.
  const auto weights = torch::nn::utils::parameters_to_vector(ddp.parameters()).detach();
  lockstep::check_same_on_all_ranks("the sum of the weights", std::to_string(weights.sum().item<double>()),
                                    world.group());
  return loss < 0.01 && loss < first_loss;
}

}  // namespace

int main() {
  try {
    const auto world = lockstep::init();
    const bool has_learned = train(world);
    if (world.rank() == 0) {
      std::printf("%d rank%s learned sin(x)%s\n", world.world_size(), world.world_size() == 1 ? "" : "s",
                  has_learned ? "" : ": NO, the loss is too high");
    }
    return has_learned ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
