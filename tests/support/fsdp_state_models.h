// Models and helpers of the FSDP tests.
#pragma once

#include <torch/nn/modules/normalization.h>

#include "lockstep/fsdp/fully_shard.h"
#include "lockstep/nn/tied_parameters.h"
#include "lockstep/shard/layout_of.h"
#include "tests/support/ddp_models.h"

namespace lockstep::fsdp_state_models {

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width)
      : up(register_module("up", torch::nn::Linear(width, 2 * width))),
        norm(register_module("norm", torch::nn::BatchNorm1d(2 * width))),
        down(register_module("down", torch::nn::Linear(2 * width, width))) {}
  at::Tensor forward(const at::Tensor& input) {
    return input + down->forward(norm->forward(at::tanh(up->forward(input))));
  }
  torch::nn::Linear up;
  torch::nn::BatchNorm1d norm;
  torch::nn::Linear down;
};
TORCH_MODULE(Block);

/// Parameters in the root before and behind its inner units, buffers, a tied bias, and 7 rows on any number of ranks.
struct NetImpl : torch::nn::Module {
  NetImpl() : first(register_module("first", torch::nn::Linear(5, 7))) {
    for (int i = 0; i < 2; ++i) blocks.push_back(register_module("block" + std::to_string(i), Block(7)));
    head = register_module("head", torch::nn::Linear(7, 3));
    register_parameter("tied", head->bias);
  }
  at::Tensor forward(const at::Tensor& input) {
    auto hidden = first->forward(input);
    for (auto& block : blocks) hidden = block->forward(hidden);
    return head->forward(hidden);
  }
  torch::nn::Linear first;
  std::vector<Block> blocks;
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Net);

/// Ranks are threads here and share the generator: one builds at a time, whatever it is.
inline std::mutex building;

template <class Build>
auto seeded(uint64_t seed, const Build& build) {
  const std::lock_guard lock(building);
  torch::manual_seed(seed);
  return build();
}

inline Net net(uint64_t seed = 5) {
  return seeded(seed, [] { return Net(); });
}

inline DeviceMesh mesh_of(const World& world) {
  return DeviceMesh::from_group(world.group(), "cpu");
}

inline FsdpUnit sharded(Net model, const FullyShardOptions& options) {
  for (auto& block : model->blocks) fully_shard(block, options);
  return fully_shard(model, options);
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
