// A small model with inner units, and training beside DDP: what FSDP's tests share.
#pragma once

#include "lockstep/fsdp/fully_shard.h"
#include "lockstep/shard/layout_of.h"
#include "tests/support/ddp_models.h"

namespace lockstep::fsdp_models {

using namespace ddp_models;
using testing::expect_error;
using torch::optim::SGD;
using torch::optim::SGDOptions;

/// Embedding, blocks with a skip and a head: parameters in the root before and behind its inner units, 7 rows on any
/// number of ranks.
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width)
      : norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        up(register_module("up", torch::nn::Linear(width, 2 * width))),
        down(register_module("down", torch::nn::Linear(2 * width, width))) {}
  at::Tensor forward(const at::Tensor& input) {
    return input + down->forward(at::tanh(up->forward(norm->forward(input))));
  }
  torch::nn::LayerNorm norm;
  torch::nn::Linear up;
  torch::nn::Linear down;
};
TORCH_MODULE(Block);

struct NetImpl : torch::nn::Module {
  NetImpl() : table(register_module("table", torch::nn::Embedding(11, 7))) {
    for (int i = 0; i < 3; ++i) blocks.push_back(register_module("block" + std::to_string(i), Block(7)));
    head = register_module("head", torch::nn::Linear(7, 3));
  }
  at::Tensor forward(const at::Tensor& input) {
    auto hidden = table->forward(input);
    for (auto& block : blocks) hidden = block->forward(hidden);
    return head->forward(hidden);
  }
  torch::nn::Embedding table;
  std::vector<Block> blocks;
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Net);

/// Ranks are threads here and share the generator: one builds at a time, whatever it is.
inline std::mutex building;

template <class Build>
auto built_from_seed(const Build& build) {
  const std::lock_guard lock(building);
  torch::manual_seed(5);
  return build();
}

inline Net net() {
  return built_from_seed([] { return Net(); });
}

inline FsdpUnit sharded(Net model, const FullyShardOptions& options = {}) {
  for (auto& block : model->blocks) fully_shard(block, options);
  return fully_shard(model, options);
}

inline DeviceMesh mesh_of(const World& world) {
  return DeviceMesh::from_group(world.group(), "cpu");
}

inline at::Tensor batch(const World& world, int step) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(100 * step + world.rank()));
  return at::randint(11, {4, 2}, generator, at::TensorOptions(at::kLong));
}

template <class Model>
at::Tensor loss_of(Model& model, const World& world, int step) {
  return model->forward(batch(world, step)).pow(2).mean();
}

/// All parameters of the sharded model equal the other one's, which has them whole.
inline void expect_same_parameters(const torch::nn::Module& shards, const torch::nn::Module& whole,
                                   const std::string& what, double tolerance = 0) {
  const auto expected = whole.named_parameters();
  for (const auto& item : shards.named_parameters()) {
    const auto layout = layout_of(item.value());
    ASSERT_TRUE(layout) << item.key();
    const auto part = layout->cut(expected[item.key()].detach());
    const bool is_same = tolerance == 0 ? part.equal(item.value().detach())
                                        : at::allclose(part, item.value().detach(), tolerance, tolerance);
    EXPECT_TRUE(is_same) << what << " " << item.key();
  }
}

/// Runs `train(model, optimizer)` under DDP and sharded; expects the same parameters.
template <class Train>
void expect_parity(const World& world, const Train& train, FullyShardOptions options = {}, double tolerance = 0) {
  DistributedDataParallel ddp(net(), DdpOptions{.process_group = world.group()});
  SGD plain(ddp.parameters(), SGDOptions(0.1).momentum(0.9));
  train(ddp, plain);
  auto model = net();
  options.mesh = mesh_of(world);
  sharded(model, options);
  SGD optimizer(model->parameters(), SGDOptions(0.1).momentum(0.9));
  train(model, optimizer);
  expect_same_parameters(*model, *ddp.module(), "after training", tolerance);
}

inline void on_worlds(const testing::RankBody& body) {
  for (const int size : {1, 2, 4}) testing::run_threads_in_gtest({.world_size = size}, body);
}

}  // namespace lockstep::fsdp_models
