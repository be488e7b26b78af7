// A communication hook of one's own: only the largest gradients travel. What stays behind is added to the next step's
// (error feedback), so nothing is lost for good.
//   lockstep-run -n 2 build/examples/comm_hook
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <cstdio>
#include <exception>
#include <map>
#include <memory>
#include <vector>

namespace {

constexpr double kShare = 0.05;  // of the gradients travel
constexpr int kSteps = 400;

/// The hook, and what it remembers between steps.
struct TopK {
  lockstep::GroupPtr group;
  std::map<std::vector<c10::TensorImpl*>, at::Tensor> left_behind = {};  // by the parameters of a bucket
  int64_t bytes_sent = 0;
  int64_t bytes_of_gradients = 0;

  /// Gathers the largest of each rank; the mean of what came together is the future's tensor.
  lockstep::FuturePtr reduce(const lockstep::GradBucket& bucket) {
    const auto gradients = bucket.buffer();
    // Buckets are laid out anew after the first step: the bucket's number would not do as a key.
    std::vector<c10::TensorImpl*> key;
    for (const auto& parameter : bucket.parameters()) key.push_back(parameter.unsafeGetTensorImpl());
    auto& kept = left_behind.try_emplace(key, torch::zeros_like(gradients)).first->second;
    kept += gradients;

    const auto count = std::max<int64_t>(1, static_cast<int64_t>(kShare * static_cast<double>(gradients.numel())));
    const auto places = std::get<1>(kept.abs().topk(count));
    // Places and values in one tensor, so that one collective is enough.
    const auto mine = torch::stack({places.to(torch::kInt), kept.index_select(0, places).view(torch::kInt)});
    kept.index_fill_(0, places, 0);
    bytes_sent += static_cast<int64_t>(mine.nbytes());
    bytes_of_gradients += static_cast<int64_t>(gradients.nbytes());

    const int64_t ranks = group->getSize();
    const auto all = torch::empty({ranks, 2, count}, mine.options());
    // Launched only: backward goes on, and the rest runs when the bytes are there.
    auto gathered = lockstep::launch_all_gather_into_tensor(all, mine, group);
    return lockstep::then(gathered.future(), [=](const at::Tensor&) {
      const auto all_places = all.select(1, 0).reshape({-1});
      const auto all_values = all.select(1, 1).reshape({-1}).view(torch::kFloat);
      return torch::zeros_like(gradients).index_add_(0, all_places, all_values).div_(ranks);
    });
  }
};

/// Mean loss of the last steps.
double train(const lockstep::World& world, const std::shared_ptr<TopK>& top_k) {
  torch::manual_seed(1);
  torch::nn::Sequential net(torch::nn::Linear(8, 256), torch::nn::Tanh(), torch::nn::Linear(256, 1));
  lockstep::DistributedDataParallel ddp(net, world.group());
  if (top_k) {
    ddp.register_comm_hook([top_k](lockstep::GradBucket& bucket) { return top_k->reduce(bucket); }, "top-k");
  }
  torch::optim::SGD optimizer(ddp.parameters(), 0.05);
  torch::manual_seed(100 + world.rank());
  double loss = 0;
  for (int step = 0; step < kSteps; ++step) {
    const auto x = torch::randn({32, 8});
    optimizer.zero_grad();
    const auto error = torch::mse_loss(ddp(x), torch::tanh(x.sum(1, true)));
    error.backward();
    optimizer.step();
    loss += step >= kSteps - 20 ? error.item<double>() / 20 : 0;
  }
  auto mean = torch::tensor({loss});
  lockstep::all_reduce(mean, world.group(), lockstep::ReduceOp::AVG);
  const auto weights = torch::nn::utils::parameters_to_vector(ddp.parameters()).detach();
  lockstep::check_same_on_all_ranks("weights", std::to_string(weights.sum().item<double>()), world.group());
  return mean.item<double>();
}

}  // namespace

int main() {
  try {
    const auto world = lockstep::init({.device = at::kCPU});
    const auto top_k = std::make_shared<TopK>(TopK{.group = world.group()});
    const double plain = train(world, nullptr);
    const double compressed = train(world, top_k);
    const double share = static_cast<double>(top_k->bytes_sent) / static_cast<double>(top_k->bytes_of_gradients);
    // A constant answer would have a loss of 0.6.
    const bool is_right = plain < 0.15 && compressed < 0.15 && share < 0.2;
    if (world.rank() == 0) {
      std::printf("loss after %d steps on %d ranks: %.4f with all gradients, %.4f with the largest %.0f %%\n", kSteps,
                  world.world_size(), plain, compressed, 100 * kShare);
      std::printf("the hook sent %.1f %% of the bytes: %s\n", 100 * share, is_right ? "correct" : "WRONG");
    }
    return is_right ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
