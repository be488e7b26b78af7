// Large batches in small bites: backward several times, communicate once.
//   lockstep-run -n 2 build/examples/gradient_accumulation
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <cstdio>
#include <exception>

namespace {

constexpr int kBites = 4;
constexpr int64_t kRowsPerBite = 8;

torch::nn::Sequential make_net() {
  torch::manual_seed(1);
  return torch::nn::Sequential(torch::nn::Linear(16, 64), torch::nn::ReLU(), torch::nn::Linear(64, 1));
}

/// The bite of a rank, the same wherever it is asked for.
at::Tensor bite_of(int rank, int bite) {
  torch::manual_seed(1000 + rank * kBites + bite);
  return torch::randn({kRowsPerBite, 16});
}

at::Tensor loss_of(const at::Tensor& output) {
  return output.pow(2).mean() / kBites;
}

at::Tensor gradients_of(const torch::nn::Module& module) {
  std::vector<at::Tensor> flat;
  for (const auto& parameter : module.parameters()) flat.push_back(parameter.grad().reshape({-1}));
  return torch::cat(flat);
}

/// What one process would compute that has all bites of all ranks.
at::Tensor gradients_of_one_process(int world_size) {
  auto net = make_net();
  for (int rank = 0; rank < world_size; ++rank) {
    for (int bite = 0; bite < kBites; ++bite) (loss_of(net->forward(bite_of(rank, bite))) / world_size).backward();
  }
  return gradients_of(*net);
}

bool accumulate(const lockstep::World& world) {
  lockstep::DistributedDataParallel ddp(make_net(), world.group());
  {
    const auto local = ddp.no_sync();
    // What counts is that forward runs in the scope.
    for (int bite = 0; bite + 1 < kBites; ++bite) loss_of(ddp(bite_of(world.rank(), bite))).backward();
  }
  const auto reduced_before = ddp.buckets_reduced();
  const auto local_gradients = gradients_of(ddp);
  loss_of(ddp(bite_of(world.rank(), kBites - 1))).backward();  // reduces the sum of all
  const auto reduced_after = ddp.buckets_reduced();

  const auto expected = gradients_of_one_process(world.world_size());
  const auto difference = (gradients_of(ddp) - expected).abs().max().item<double>();
  const auto spread = (local_gradients - expected).abs().max().item<double>();
  if (world.rank() == 0) {
    std::printf("%d backwards on each of %d ranks; buckets reduced: %lld in the first %d, %lld in the last\n", kBites,
                world.world_size(), static_cast<long long>(reduced_before), kBites - 1,
                static_cast<long long>(reduced_after - reduced_before));
    std::printf("largest difference to one process with all rows: %.1e before the last backward, %.1e after it\n",
                spread, difference);
  }
  return reduced_before == 0 && reduced_after > 0 && difference < 1e-6 && spread > 1e-4;
}

}  // namespace

int main() {
  try {
    // On the CPU, where the rows are made.
    const auto world = lockstep::init({.device = at::kCPU});
    const bool is_right = accumulate(world);
    if (world.rank() == 0) std::printf("%s\n", is_right ? "correct" : "WRONG");
    return is_right ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
