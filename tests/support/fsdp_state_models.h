// The model of tests of state: the others' small one, with buffers, a tied bias and floating inputs.
#pragma once

#include "lockstep/nn/tied_parameters.h"
#include "tests/support/fsdp_models.h"

namespace lockstep::fsdp_state_models {

using fsdp_models::built_from_seed;
using fsdp_models::mesh_of;
using fsdp_models::sharded;

using BlockImpl = fsdp_models::SkipBlock<torch::nn::BatchNorm1d, torch::nn::BatchNormOptions>;

struct NetImpl : fsdp_models::SkipNet<torch::nn::Linear, torch::nn::ModuleHolder<BlockImpl>> {
  NetImpl() : NetImpl(torch::nn::Linear(5, 7)) {}
  explicit NetImpl(const torch::nn::Linear& made) : SkipNet("first", made, 2), first(made) {
    register_parameter("tied", head->bias);
  }
  torch::nn::Linear first;
};
TORCH_MODULE(Net);

inline Net net(uint64_t seed = 5) {
  return built_from_seed([] { return Net(); }, seed);
}

/// Of rank `rank` in a step; the same on any number of ranks if `rank` is.
inline at::Tensor batch(int step, int rank = 0) {
  return at::randn({4, 5}, at::detail::createCPUGenerator(static_cast<uint64_t>(100 * step + rank)),
                   at::TensorOptions(at::kFloat));
}

template <class Model>
at::Tensor loss_of(Model& model, int step, int rank = 0) {
  return model->forward(batch(step, rank)).pow(2).mean();
}

/// Steps [from, to) on batches that all ranks have alike, so that any number of ranks trains the same.
template <class Model>
void train(Model& model, torch::optim::Optimizer& optimizer, int from, int to) {
  for (int step = from; step < to; ++step) {
    optimizer.zero_grad();
    loss_of(model, step).backward();
    optimizer.step();
  }
}

/// Parameters and buffers of both are the same bits, whichever of them is sharded.
inline void expect_same_model(const torch::nn::Module& actual, const torch::nn::Module& whole,
                              const std::string& what) {
  const auto expected = whole.named_parameters();
  for (const auto& item : actual.named_parameters()) {
    const auto layout = layout_of(item.value());
    const auto& wanted = expected[item.key()].detach();
    EXPECT_TRUE((layout ? layout->cut(wanted) : wanted).equal(item.value().detach())) << what << " " << item.key();
  }
  const auto buffers = whole.named_buffers();
  for (const auto& item : actual.named_buffers()) {
    EXPECT_TRUE(buffers[item.key()].equal(item.value())) << what << " " << item.key();
  }
}

}  // namespace lockstep::fsdp_state_models
