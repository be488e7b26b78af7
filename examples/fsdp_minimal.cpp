// The smallest training loop with fully sharded data parallelism: every rank has a part of each layer, of its gradients
// and of the optimizer's state, and a part of the data.
//   lockstep-run -n 2 build/examples/fsdp_minimal
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdio>
#include <exception>

namespace {

/// Learns y = sin(x) from points that no other rank has. Returns whether it did.
bool train(const lockstep::World& world) {
  torch::manual_seed(1);  // ranks begin with the same weights, of which each keeps its part
  torch::nn::Sequential net(torch::nn::Linear(1, 64), torch::nn::Tanh(), torch::nn::Linear(64, 64), torch::nn::Tanh(),
                            torch::nn::Linear(64, 1));
  net->to(world.device());
  // Each layer is whole only while it computes. The net is used as before.
  lockstep::shard_by_policy(net, lockstep::module_wrap_policy<torch::nn::LinearImpl>());
  torch::optim::AdamW optimizer(net->parameters(), 1e-2);  // after sharding: these are this rank's parts

  torch::manual_seed(100 + world.rank());
  double loss = 0;
  for (int step = 1; step <= 300; ++step) {
    const auto x = (torch::rand({32, 1}, world.device()) * 2 - 1) * M_PI;
    optimizer.zero_grad();
    const auto error = torch::mse_loss(net->forward(x), torch::sin(x));
    error.backward();  // on return every rank has its part of the mean of all ranks' gradients
    optimizer.step();

    auto mean = error.detach().clone();
    lockstep::all_reduce(mean, world.group(), lockstep::ReduceOp::AVG);
    loss = mean.item<double>();
    if (world.rank() == 0 && (step == 1 || step % 50 == 0)) std::printf("step %3d: loss %.5f\n", step, loss);
  }

  // What an unsharded net would save.
  const auto whole = lockstep::full_state_dict(*net);
  int64_t mine = 0;
  int64_t all = 0;
  for (const auto& parameter : net->parameters()) mine += parameter.numel();
  for (const auto& [name, weight] : whole) all += weight.numel();
  if (world.rank() == 0) {
    std::printf("rank 0 holds %lld of %lld weights\n", static_cast<long long>(mine), static_cast<long long>(all));
  }
  return loss < 0.01 && (world.world_size() == 1 || mine < all);
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
