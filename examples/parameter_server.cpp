// A parameter server: rank 0 keeps the parameters, the other ranks fetch them, compute gradients on their own data and
// send those back; the server steps with the mean once all have sent theirs, and each waits for that without holding a
// thread of the server.
//   build/bin/lockstep-run -n 3 build/examples/parameter_server
#include <torch/torch.h>

#include <cstdio>
#include <mutex>
#include <string>
#include <vector>

#include "lockstep/comm/world.h"
#include "lockstep/rpc/call.h"
#include "lockstep/rpc/rpc.h"

namespace rpc = lockstep::rpc;
using Tensors = std::vector<at::Tensor>;

namespace {

torch::nn::Sequential make_net() {
  return torch::nn::Sequential(torch::nn::Linear(4, 16), torch::nn::Tanh(), torch::nn::Linear(16, 1));
}

Tensors values_of(const Tensors& parameters) {
  Tensors values;
  for (const auto& each : parameters) values.push_back(each.detach().clone());
  return values;
}

class ParameterServer {
 public:
  explicit ParameterServer(std::int64_t trainers) : trainers_(trainers) {}

  Tensors parameters() {
    const std::lock_guard lock(mutex_);
    return values_of(net_->parameters());
  }

  /// Answers with the new parameters when the last trainer's gradients have come.
  rpc::Future<Tensors> push(const Tensors& gradients) {
    rpc::Promise<Tensors> round;
    Tensors updated;
    {
      const std::lock_guard lock(mutex_);
      const auto parameters = net_->parameters();
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        auto& grad = parameters[i].mutable_grad();
        grad = grad.defined() ? grad + gradients[i] / trainers_ : gradients[i] / trainers_;
      }
      round = round_;
      if (++arrived_ < trainers_) return round.future();
      optimizer_.step();
      optimizer_.zero_grad();
      arrived_ = 0;
      round_ = {};
      updated = values_of(parameters);
    }
    round.set_value(updated);
    return round.future();
  }

 private:
  std::mutex mutex_;
  std::int64_t trainers_;
  std::int64_t arrived_ = 0;
  torch::nn::Sequential net_ = make_net();
  torch::optim::Adam optimizer_{net_->parameters(), torch::optim::AdamOptions(0.01)};
  rpc::Promise<Tensors> round_;
};

const auto server_class = rpc::class_<ParameterServer>("ParameterServer")
                              .constructor<std::int64_t>()
                              .method("parameters", &ParameterServer::parameters)
                              .method("push", &ParameterServer::push);

/// The same object for every trainer, whoever asks first.
const auto server = rpc::function("server", [](std::int64_t trainers) {
  static const rpc::RRef<ParameterServer> the_server(std::make_shared<ParameterServer>(trainers));
  return the_server;
});

double train(const rpc::RRef<ParameterServer>& parameters, int rank) {
  torch::manual_seed(rank);
  auto net = make_net();
  const auto take = [&](const Tensors& values) {
    const torch::NoGradGuard no_grad;
    for (std::size_t i = 0; i < values.size(); ++i) net->parameters()[i].copy_(values[i]);
  };
  take(parameters.rpc_sync(&ParameterServer::parameters));
  double first = 0;
  double last = 0;
  for (int step = 0; step < 100; ++step) {
    const auto x = torch::randn({32, 4});
    const auto loss = torch::mse_loss(net->forward(x), x.sum(1, /*keepdim=*/true).sin());
    const auto gradients = torch::autograd::grad({loss}, net->parameters());
    take(parameters.rpc_sync(&ParameterServer::push, gradients));
    last = loss.item<double>();
    if (step == 0) first = last;
  }
  std::printf("trainer %d: loss %.4f, at first %.4f\n", rank, last, first);
  return last / first;
}

}  // namespace

int main() {
  const auto world = lockstep::init();
  torch::manual_seed(0);
  rpc::init_rpc("rank" + std::to_string(world.rank()), world.rank(), world.world_size());
  double ratio = 0;
  if (world.rank() > 0) ratio = train(rpc::rpc_sync("rank0", server, world.world_size() - 1), world.rank());
  rpc::shutdown();
  return ratio < 0.8 ? 0 : 1;
}
