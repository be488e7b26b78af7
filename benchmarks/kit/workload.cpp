#include "benchmarks/kit/workload.h"

#include <torch/nn/modules/linear.h>

#include <vector>

#include "examples/gpt/model.h"

namespace lockstep::bench {
namespace {

struct Layers : Trainable {
  Layers(int64_t count, int64_t width) {
    for (int64_t i = 0; i < count; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i), torch::nn::Linear(width, width)));
    }
  }
  at::Tensor forward(const at::Tensor& input) override {
    auto value = input;
    for (auto& layer : layers) value = at::relu(layer->forward(value));
    return value;
  }
  std::vector<torch::nn::Linear> layers;
};

struct DemoGpt : Trainable {
  explicit DemoGpt(const examples::GptConfig& config) : gpt(register_module("gpt", examples::Gpt(config))) {}
  at::Tensor forward(const at::Tensor& input) override { return gpt->forward(input); }
  std::vector<std::shared_ptr<torch::nn::Module>> blocks() const override { return gpt->blocks->children(); }
  examples::Gpt gpt;
};

}  // namespace

Workload make_workload(const std::string& name, int64_t width, c10::Device device) {
  Workload workload;
  at::manual_seed(1);
  if (name == "mlp") {
    workload = {std::make_shared<Layers>(8, 1024), at::randn({16, 1024})};
  } else if (name == "300-layers") {
    workload = {std::make_shared<Layers>(300, width), at::randn({4, width})};
  } else {
    TORCH_CHECK(name == "gpt", "unknown model ", name);
    const examples::GptConfig config;
    workload = {std::make_shared<DemoGpt>(config), at::randint(config.vocabulary, {4, config.context}, at::kLong)};
  }
  workload.module->to(device);
  workload.input = workload.input.to(device);
  return workload;
}

void forget_gradients(const torch::nn::Module& module) {
  for (auto& parameter : module.parameters()) parameter.mutable_grad() = at::Tensor();
}

}  // namespace lockstep::bench
