// The models that are trained, and their batches. training_peer.py has the same ones.
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

namespace lockstep::bench {

struct Trainable : torch::nn::Module {
  virtual at::Tensor forward(const at::Tensor& input) = 0;
  /// What repeats in it, and together is most of it.
  virtual std::vector<std::shared_ptr<torch::nn::Module>> blocks() const { return children(); }
};

struct Workload {
  std::shared_ptr<Trainable> module;
  at::Tensor input;  // one batch of this rank
};

/// "mlp": 8 layers of 1024x1024, 16 rows. "300-layers": 300 layers of width x width, 4 rows. "gpt": the demo's model.
/// The loss of each is the mean of its squared outputs.
Workload make_workload(const std::string& name, int64_t width, c10::Device device);

/// As zero_grad(), without an optimizer.
void forget_gradients(const torch::nn::Module& module);

}  // namespace lockstep::bench
