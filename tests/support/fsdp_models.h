// A small model with inner units, and training beside DDP: what FSDP's tests share.
#pragma once

#include <torch/nn/modules/normalization.h>

#include "lockstep/fsdp/fully_shard.h"
#include "lockstep/shard/layout_of.h"
#include "tests/support/ddp_models.h"

namespace lockstep::fsdp_models {

using namespace ddp_models;
using testing::expect_error;
using torch::optim::SGD;
using torch::optim::SGDOptions;

/// A norm and two layers with a skip around them.
template <class Norm, class NormOptions>
struct SkipBlock : torch::nn::Module {
  explicit SkipBlock(int64_t width)
      : norm(register_module("norm", Norm(NormOptions({width})))),
        up(register_module("up", torch::nn::Linear(width, 2 * width))),
        down(register_module("down", torch::nn::Linear(2 * width, width))) {}
  at::Tensor forward(const at::Tensor& input) {
    return input + down->forward(at::tanh(up->forward(norm->forward(input))));
  }
  Norm norm;
  torch::nn::Linear up;
  torch::nn::Linear down;
};

/// A first layer, blocks and a head: parameters in the root before and behind its inner units, 7 rows on any number of
/// ranks.
template <class First, class Block>
struct SkipNet : torch::nn::Module {
  SkipNet(const std::string& first_name, First first, int count) : first_(register_module(first_name, first)) {
    for (int i = 0; i < count; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), Block(7)));
    }
    head = register_module("head", torch::nn::Linear(7, 3));
  }
  at::Tensor forward(const at::Tensor& input) {
    auto hidden = first_->forward(input);
    for (auto& block : blocks) hidden = block->forward(hidden);
    return head->forward(hidden);
  }
  std::vector<Block> blocks;
  torch::nn::Linear head{nullptr};

 private:
  First first_;
};

using BlockImpl = SkipBlock<torch::nn::LayerNorm, torch::nn::LayerNormOptions>;
using Block = torch::nn::ModuleHolder<BlockImpl>;

struct NetImpl : SkipNet<torch::nn::Embedding, Block> {
  NetImpl() : NetImpl(torch::nn::Embedding(11, 7)) {}
  explicit NetImpl(const torch::nn::Embedding& made) : SkipNet("table", made, 3), table(made) {}
  torch::nn::Embedding table;
};
TORCH_MODULE(Net);

/// Ranks are threads here and share the generator: one builds at a time, whatever it is.
inline std::mutex building;

template <class Build>
auto built_from_seed(const Build& build, uint64_t seed = 5) {
  const std::lock_guard lock(building);
  torch::manual_seed(seed);
  return build();
}

inline Net net() {
  return built_from_seed([] { return Net(); });
}

template <class Model>
FsdpUnit sharded(Model model, const FullyShardOptions& options = {}) {
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

/// Gradients of `whole` cut as the shards are, compared bit by bit.
inline void expect_same_gradients(const torch::nn::Module& shards, const torch::nn::Module& whole,
                                  const std::string& what, double tolerance = 0) {
  const auto expected = whole.named_parameters();
  for (const auto& item : shards.named_parameters()) {
    const auto& grad = expected[item.key()].grad();
    ASSERT_EQ(item.value().grad().defined(), grad.defined()) << what << " " << item.key();
    if (!grad.defined()) continue;
    const auto part = layout_of(item.value())->cut(grad);
    const bool is_same = tolerance == 0 ? part.equal(item.value().grad())
                                        : at::allclose(part, item.value().grad(), tolerance, tolerance);
    EXPECT_TRUE(is_same) << what << " " << item.key();
  }
}

/// The same model under DDP and sharded.
struct Pair {
  explicit Pair(const World& world, FullyShardOptions options = {})
      : ddp(net(), DdpOptions{.process_group = world.group()}), model(net()), root(build(world, options)) {}
  FsdpUnit build(const World& world, FullyShardOptions& options) {
    if (!options.mesh) options.mesh = mesh_of(world);
    return sharded(model, options);
  }
  DistributedDataParallel<Net> ddp;
  Net model;
  FsdpUnit root;
};

inline void on_worlds(const testing::RankBody& body) {
  for (const int size : {1, 2, 4}) testing::run_threads_in_gtest({.world_size = size}, body);
}

}  // namespace lockstep::fsdp_models
