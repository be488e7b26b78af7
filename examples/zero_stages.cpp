// One option from plain data parallelism to sharded optimizer state and sharded gradients, and a checkpoint that any
// stage, and any number of ranks, goes on from.
//   lockstep-run -n 2 build/examples/zero_stages
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <cstdio>
#include <exception>

namespace {

using lockstep::ZeroStage;
using Optimizer = lockstep::ZeroRedundancyOptimizer<lockstep::optim::AdamW>;

constexpr int kSteps = 10;
constexpr int64_t kRows = 32;
constexpr double kKiB = 1024;

torch::nn::Sequential make_net() {
  torch::manual_seed(1);
  return torch::nn::Sequential(torch::nn::Linear(16, 256), torch::nn::GELU(), torch::nn::Linear(256, 256),
                               torch::nn::GELU(), torch::nn::Linear(256, 1));
}

struct Result {
  at::Tensor weights = {};
  lockstep::ZeroMemoryReport memory = {};
  lockstep::OptimizerStateDict state = {};
};

/// Steps [first, last), going on from `before` if it is given.
Result train(const lockstep::World& world, ZeroStage stage, int first, int last, const Result* before = nullptr) {
  auto net = make_net();
  if (before != nullptr) torch::nn::utils::vector_to_parameters(before->weights, net->parameters());
  lockstep::DistributedDataParallel ddp(net, world.group());
  Optimizer optimizer(ddp.parameters(), {.lr = 1e-2}, {.stage = stage, .ddp = ddp});
  if (before != nullptr) optimizer.load_state_dict(before->state);
  for (int step = first; step < last; ++step) {
    torch::manual_seed(1000 + step);
    const auto x = torch::randn({kRows, 16}).tensor_split(world.world_size())[world.rank()];
    optimizer.zero_grad();
    (ddp(x) - x.sum(1, true).sin()).pow(2).mean().backward();
    optimizer.clip_grad_norm_(1.0);
    optimizer.step();
  }
  Result result{.weights = torch::nn::utils::parameters_to_vector(net->parameters()).detach().clone(),
                .memory = optimizer.memory_report()};
  for (int rank = 0; rank < world.world_size(); ++rank) {
    // Everyone wants it here; a program that writes it to a file needs it on one rank, or takes save_sharded().
    optimizer.consolidate_state_dict(rank);
    if (rank == world.rank()) result.state = optimizer.state_dict();
  }
  return result;
}

}  // namespace

int main() {
  try {
    const auto world = lockstep::init({.device = at::kCPU});
    const auto expected = train(world, ZeroStage::kReplicated, 0, kSteps);
    bool is_right = true;
    for (const auto stage : {ZeroStage::kReplicated, ZeroStage::kState, ZeroStage::kGradients}) {
      const auto whole = train(world, stage, 0, kSteps);
      // The second half in another stage, from the state of the first.
      const auto half = train(world, stage, 0, kSteps / 2);
      const auto next = stage == ZeroStage::kReplicated ? ZeroStage::kGradients : ZeroStage::kReplicated;
      const auto resumed = train(world, next, kSteps / 2, kSteps, &half);
      const auto difference = [&](const Result& result) {
        return (result.weights - expected.weights).abs().max().item<double>();
      };
      const bool is_same = difference(whole) < 1e-5 && difference(resumed) < 1e-5;
      is_right = is_right && is_same;
      if (world.rank() != 0) continue;
      // Whole gradients, as DDP leaves them, are as large as the parameters.
      const auto gradients = stage == ZeroStage::kGradients ? whole.memory.gradients : whole.memory.parameters;
      std::printf("stage %d: per rank %6.0f KiB of state, %6.0f KiB of gradients; weights as in plain training: %s\n",
                  static_cast<int>(stage), static_cast<double>(whole.memory.state) / kKiB,
                  static_cast<double>(gradients) / kKiB, is_same ? "yes" : "NO");
    }
    return is_right ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
