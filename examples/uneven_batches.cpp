// Ranks with different numbers of samples: ddp.backward(loss, samples) gives the exact mean over all samples, which an
// average over ranks is not.
//   lockstep-run -n 2 build/examples/uneven_batches
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <cstdio>
#include <exception>

namespace {

constexpr int kSteps = 20;

torch::nn::Sequential make_net() {
  torch::manual_seed(1);
  return torch::nn::Sequential(torch::nn::Linear(4, 16), torch::nn::Tanh(), torch::nn::Linear(16, 1));
}

/// Rank r has r + 1 rows, twice as many in every other step; the last rank has none in every fifth.
int64_t rows_of(int rank, int world_size, int step) {
  if (world_size > 1 && rank == world_size - 1 && step % 5 == 4) return 0;
  return (rank + 1) * (step % 2 + 1);
}

/// The rows of all ranks, one after the other.
at::Tensor rows_of_all(int world_size, int step) {
  int64_t rows = 0;
  for (int rank = 0; rank < world_size; ++rank) rows += rows_of(rank, world_size, step);
  torch::manual_seed(1000 + step);
  return torch::randn({rows, 4});
}

at::Tensor my_rows(const lockstep::World& world, int step) {
  int64_t first = 0;
  for (int rank = 0; rank < world.rank(); ++rank) first += rows_of(rank, world.world_size(), step);
  const auto count = rows_of(world.rank(), world.world_size(), step);
  return rows_of_all(world.world_size(), step).narrow(0, first, count);
}

at::Tensor errors(const at::Tensor& output, const at::Tensor& x) {
  return (output - torch::sin(x.sum(1, true))).pow(2);
}

at::Tensor weights_of(const torch::nn::Module& module) {
  return torch::nn::utils::parameters_to_vector(module.parameters()).detach();
}

at::Tensor train_alone(int world_size) {
  auto net = make_net();
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  for (int step = 0; step < kSteps; ++step) {
    const auto x = rows_of_all(world_size, step);
    optimizer.zero_grad();
    errors(net->forward(x), x).mean().backward();
    optimizer.step();
  }
  return weights_of(*net);
}

at::Tensor train_together(const lockstep::World& world, bool is_weighted) {
  lockstep::DistributedDataParallel ddp(make_net(), world.group());
  torch::optim::SGD optimizer(ddp.parameters(), 0.1);
  for (int step = 0; step < kSteps; ++step) {
    const auto x = my_rows(world, step);
    const auto count = x.size(0);
    optimizer.zero_grad();
    // The mean over no rows would be NaN, and 0 times NaN is NaN.
    const auto loss = errors(ddp(x), x).sum() / std::max<int64_t>(1, count);
    ddp.backward(loss, is_weighted ? static_cast<double>(count) : 1.0);
    optimizer.step();
  }
  return weights_of(ddp);
}

}  // namespace

int main() {
  try {
    const auto world = lockstep::init({.device = at::kCPU});
    const auto expected = train_alone(world.world_size());
    const auto difference = [&](bool is_weighted) {
      return (train_together(world, is_weighted) - expected).abs().max().item<double>();
    };
    const double weighted = difference(true);
    const double unweighted = difference(false);
    const bool is_right = weighted < 1e-5 && (world.world_size() == 1 || unweighted > 1e-3);
    if (world.rank() == 0) {
      std::printf("%d steps on %d ranks that have different numbers of rows\n", kSteps, world.world_size());
      std::printf("largest difference to one process with all rows: %.1e weighted by rows, %.1e not weighted: %s\n",
                  weighted, unweighted, is_right ? "correct" : "WRONG");
    }
    return is_right ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
