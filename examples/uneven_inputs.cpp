// Ranks with different numbers of batches: in a Join scope those that have run out mirror the others' collectives, so
// nobody hangs, and all end with the same model. DDP and a sharded optimizer take part.
//   lockstep-run -n 2 build/examples/uneven_inputs
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <cstdio>
#include <exception>

namespace {

constexpr int kRounds = 3;

}  // namespace

int main() {
  try {
    const auto world = lockstep::init({.device = at::kCPU});
    torch::manual_seed(1);
    lockstep::DistributedDataParallel ddp(torch::nn::Linear(4, 1), world.group());
    lockstep::ZeroRedundancyOptimizer<lockstep::optim::SGD> optimizer(ddp.parameters(), {.lr = 0.1, .momentum = 0.9},
                                                                      world.group());
    bool is_right = true;
    for (int round = 0; round < kRounds; ++round) {
      // Rank r has 5 + 2 r batches.
      const int batches = 5 + 2 * world.rank();
      // Means are over the ranks that still have inputs.
      lockstep::Join scope({&ddp, &optimizer}, {.options = {.divide_by_initial_world_size = false}});
      const auto report = scope.run([&] {
        for (int i = 0; i < batches; ++i) {
          torch::manual_seed(1000 * round + 10 * i + world.rank());
          const auto x = torch::randn({8, 4});
          optimizer.zero_grad();
          torch::mse_loss(ddp(x), x.sum(1, true)).backward();
          optimizer.step();
        }
      });
      is_right = is_right && report.own_iterations == batches &&
                 report.own_iterations + report.mirrored_iterations == 5 + 2 * (world.world_size() - 1);
      if (world.rank() == 0) {
        std::printf("round %d: rank 0 had %lld batches and mirrored %lld\n", round,
                    static_cast<long long>(report.own_iterations), static_cast<long long>(report.mirrored_iterations));
      }
    }
    const auto weights = torch::nn::utils::parameters_to_vector(ddp.parameters()).detach();
    auto first = weights.clone();
    lockstep::broadcast(first, 0, world.group());
    const bool is_same = at::equal(first, weights);
    std::printf("rank %d: weights as on rank 0: %s\n", world.rank(), is_same ? "yes" : "NO");
    return is_right && is_same ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
