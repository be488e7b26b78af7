// Dropout in checkpoints of sharded models: ranks as processes, each with a generator of its own.
#include "lockstep/testing/memory_probe.h"

namespace lockstep::checkpointed_processes_test {

struct LayerImpl : torch::nn::Module {
  explicit LayerImpl(int64_t width)
      : up(register_module("up", torch::nn::Linear(width, 4 * width))),
        down(register_module("down", torch::nn::Linear(4 * width, width))),
        drop(register_module("drop", torch::nn::Dropout(0.3))) {}
  at::Tensor forward(const at::Tensor& x) { return x + drop(down(at::gelu(up(x)))); }
  torch::nn::Linear up, down;
  torch::nn::Dropout drop;
};
TORCH_MODULE(Layer);

struct Trained {
  std::vector<at::Tensor> parameters;
  int64_t peak_bytes = 0;
};

template <class M>
Trained train(const World& world) {
  torch::manual_seed(1);
  torch::nn::Sequential model;
  for (int i = 0; i < 6; ++i) model->push_back(M(16));
  for (auto& layer : *model) fully_shard(*layer.ptr());
  fully_shard(model);
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  torch::manual_seed(10 + world.rank());
  const auto x = at::randn({256, 16});
  Trained trained;
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    const testing::MemoryProbe probe;
    model->forward(x).pow(2).mean().backward();
    trained.peak_bytes = std::max(trained.peak_bytes, probe.total().peak_bytes);
    optimizer.step();
  }
  for (const auto& parameter : model->parameters()) trained.parameters.push_back(parameter.detach().clone());
  return trained;
}

// FSDP-84: the same weights with dropout, and less memory.
LOCKSTEP_PROCESS_TEST(CheckpointedProcesses, TrainShardedModelsWithDropoutInLessMemory, 2) {
  const auto plain = train<Layer>(world);
  const auto checkpointed = train<Checkpointed<Layer>>(world);
  for (std::size_t i = 0; i < plain.parameters.size(); ++i) {
    EXPECT_TRUE(checkpointed.parameters[i].equal(plain.parameters[i])) << i;
  }
  EXPECT_LT(checkpointed.peak_bytes, plain.peak_bytes / 2);
}

}  // namespace lockstep::checkpointed_processes_test
