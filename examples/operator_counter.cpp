// What a training step consists of: calls, bytes and floating point operations by operator, forward and backward.
//   lockstep-run -n 2 build/examples/operator_counter
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <cstdio>
#include <exception>

namespace {

constexpr int64_t kBatch = 16;
constexpr int64_t kWidth = 32;
constexpr int64_t kHidden = 128;

bool run(const lockstep::World& world) {
  torch::manual_seed(1);
  torch::nn::Sequential net(torch::nn::Linear(kWidth, kHidden), torch::nn::GELU(), torch::nn::Linear(kHidden, kWidth));
  lockstep::DistributedDataParallel ddp(net, world.group());
  const auto x = torch::randn({kBatch, kWidth});

  lockstep::OperatorCounter counter;
  at::Tensor loss;
  {
    const auto counting = counter.count("forward");
    loss = ddp(x).pow(2).mean();
  }
  {
    const auto counting = counter.count("backward");  // whichever of autograd's threads it runs in
    loss.backward();
  }
  if (world.rank() == 0) std::fputs(counter.to_string().c_str(), stdout);

  // Two products forward, and twice that backward, less the gradient of x, which nobody needs.
  const auto product = 2 * kBatch * kWidth * kHidden;
  return counter.total("forward").flops == 2 * product && counter.total("backward").flops == 3 * product;
}

}  // namespace

int main() {
  try {
    const auto world = lockstep::init({.device = at::kCPU});
    const bool is_right = run(world);
    if (world.rank() == 0) std::printf("flops as worked out by hand: %s\n", is_right ? "correct" : "WRONG");
    return is_right ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
