// Training goes on when a rank dies:
//
//   lockstep-run --survivors -n 4 build/examples/survivors          one rank kills itself in the middle
//   lockstep-run --survivors -n 4 build/examples/survivors --wait   kill -9 one of them yourself
//
// The others finish the step that failed, divide the optimizer's state anew, and train to the end, without a restart.
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <chrono>
#include <csignal>
#include <iostream>
#include <string>
#include <thread>

namespace {

constexpr int kSteps = 40;

struct NetImpl : torch::nn::Module {
  NetImpl()
      : hidden(register_module("hidden", torch::nn::Linear(8, 64))),
        out(register_module("out", torch::nn::Linear(64, 1))) {}
  at::Tensor forward(const at::Tensor& x) { return out->forward(torch::relu(hidden->forward(x))); }
  torch::nn::Linear hidden;
  torch::nn::Linear out;
};
TORCH_MODULE(Net);

}  // namespace

int main(int count, char** arguments) {
  const bool waits = count > 1 && std::string(arguments[1]) == "--wait";
  const auto world = lockstep::init({.timeout = std::chrono::seconds(60)});
  auto group = world.group();

  torch::manual_seed(0);
  Net net;
  lockstep::DistributedDataParallel ddp(net, group, {.recoverable = true});
  lockstep::ZeroRedundancyOptimizer<torch::optim::AdamW> optimizer(net->parameters(), {0.01});
  torch::manual_seed(world.rank());

  at::Tensor loss;
  for (int step = 0; step < kSteps; ++step) {
    if (!waits && step == kSteps / 2 && world.rank() == 1 && world.world_size() > 1) ::raise(SIGKILL);
    if (waits) std::this_thread::sleep_for(std::chrono::milliseconds(500));
    const auto input = torch::randn({16, 8});
    bool has_failed = false;
    bool has_gradients = false;
    for (bool is_over = false; !is_over;) {
      try {
        if (has_failed) {
          group = lockstep::surviving_group(group);
          const auto recovered = ddp.recover(group);
          optimizer.recover(group);
          if (!has_gradients) has_gradients = recovered == lockstep::Recovered::kStep;
          has_failed = false;
          std::cout << "step " << step << ": going on with " << group->getSize() << " ranks" << std::endl;
        }
        if (!has_gradients) {
          optimizer.zero_grad();
          loss = (ddp(input) - input.sum(1, true)).pow(2).mean();
          loss.backward();
          has_gradients = true;
        }
        optimizer.step();
        is_over = true;
      } catch (const c10::DistBackendError& error) {
        std::cout << "step " << step << ": " << error.what_without_backtrace() << std::endl;
        has_failed = true;
      }
    }
  }

  // All who are left have the same model.
  const auto mine = torch::nn::utils::parameters_to_vector(net->parameters());
  auto first = mine.clone();
  lockstep::broadcast(first, 0, group);
  const bool is_same = at::equal(mine, first) && loss.isfinite().item<bool>();
  std::cout << "rank " << world.rank() << ": loss " << loss.item<double>()
            << (is_same ? "" : ", and other parameters than the others") << std::endl;
  return is_same ? 0 : 1;
}
