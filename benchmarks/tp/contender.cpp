#include "benchmarks/tp/contender.h"

#include <ATen/ATen.h>
#include <malloc.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <functional>
#include <memory>
#include <vector>

#include "benchmarks/kit/workload.h"
#include "lockstep/checkpointing/checkpoint.h"
#include "lockstep/dtensor/dtensor.h"
#include "lockstep/tp/parallelize_module.h"

namespace lockstep::bench {
namespace {

constexpr int64_t kBatch = 4;
constexpr int64_t kLength = 128;
constexpr int64_t kWidth = 128;
constexpr int64_t kHeads = 4;
constexpr int64_t kRegionWidth = 32;
constexpr int64_t kRegionRows = 4;
constexpr int64_t kDeepBlocks = 16;
constexpr int64_t kDeepWidth = 128;
constexpr int64_t kDeepRows = 2048;

struct Mlp : torch::nn::Module {
  explicit Mlp(int64_t width)
      : up(register_module("up", torch::nn::Linear(width, 4 * width))),
        down(register_module("down", torch::nn::Linear(4 * width, width))) {}
  at::Tensor forward(const at::Tensor& x) { return down->forward(at::gelu(up->forward(x))); }
  torch::nn::Linear up;
  torch::nn::Linear down;
};

struct Attention : torch::nn::Module {
  Attention()
      : q(register_module("q", torch::nn::Linear(kWidth, kWidth))),
        k(register_module("k", torch::nn::Linear(kWidth, kWidth))),
        v(register_module("v", torch::nn::Linear(kWidth, kWidth))),
        out(register_module("out", torch::nn::Linear(kWidth, kWidth))) {}
  at::Tensor forward(const at::Tensor& x) {
    // The heads of this rank: -1 is what is left of them.
    const auto heads = [&](torch::nn::Linear& layer) {
      return layer->forward(x).view({kBatch, kLength, -1, kWidth / kHeads}).transpose(1, 2);
    };
    const auto mixed = at::scaled_dot_product_attention(heads(q), heads(k), heads(v), {}, 0, /*is_causal=*/true);
    return out->forward(mixed.transpose(1, 2).reshape({kBatch, kLength, -1}));
  }
  torch::nn::Linear q;
  torch::nn::Linear k;
  torch::nn::Linear v;
  torch::nn::Linear out;
};

struct Block : Trainable {
  Block()
      : attention_norm(register_module("attention_norm", norm())),
        attention(register_module("attention", std::make_shared<Attention>())),
        mlp_norm(register_module("mlp_norm", norm())),
        mlp(register_module("mlp", std::make_shared<Mlp>(kWidth))) {}
  at::Tensor forward(const at::Tensor& input) override {
    const auto x = input + attention->forward(attention_norm->forward(input));
    return x + mlp->forward(mlp_norm->forward(x));
  }
  static torch::nn::LayerNorm norm() { return torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})); }

  torch::nn::LayerNorm attention_norm;
  std::shared_ptr<Attention> attention;
  torch::nn::LayerNorm mlp_norm;
  std::shared_ptr<Mlp> mlp;
};

ParallelPlan block_plan(bool is_sequence_parallel) {
  const auto outside = is_sequence_parallel ? Placement(Shard(1)) : Placement(Replicate());
  const ColwiseParallel colwise({.input_layouts = outside});
  const RowwiseParallel rowwise({.output_layouts = outside});
  ParallelPlan plan = {
      {"attention.[qkv]", colwise}, {"attention.out", rowwise}, {"mlp.up", colwise}, {"mlp.down", rowwise}};
  if (is_sequence_parallel) plan.emplace_back("*_norm", SequenceParallel());
  return plan;
}

struct Regions : Trainable {
  explicit Regions(bool checkpoints) : is_checkpointed(checkpoints) {
    for (int64_t i = 0; i < kRegions; ++i) {
      layers.push_back(register_module(std::to_string(i), torch::nn::Linear(kRegionWidth, kRegionWidth)));
    }
  }
  at::Tensor forward(const at::Tensor& input) override {
    auto value = input;
    for (const auto& layer : layers) {
      const auto region = [layer = layer.ptr()](const at::Tensor& x) { return at::relu(layer->forward(x)); };
      value = is_checkpointed ? checkpoint(region, value) : region(value);
    }
    return value;
  }
  const bool is_checkpointed;
  std::vector<torch::nn::Linear> layers;
};

struct Deep : Trainable {
  explicit Deep(bool checkpoints) : is_checkpointed(checkpoints) {
    for (int64_t i = 0; i < kDeepBlocks; ++i) {
      layers.push_back(register_module(std::to_string(i), std::make_shared<Mlp>(kDeepWidth)));
    }
  }
  at::Tensor forward(const at::Tensor& input) override {
    auto value = input;
    for (const auto& layer : layers) {
      const auto block = [layer](const at::Tensor& x) { return layer->forward(x); };
      value = value + (is_checkpointed ? checkpoint(block, value) : block(value));
    }
    return value;
  }
  const bool is_checkpointed;
  std::vector<std::shared_ptr<Mlp>> layers;
};

TimedWork step_of(const std::string& what, const std::shared_ptr<Trainable>& module, const at::Tensor& input) {
  module->to(input.device());
  return {what, [module, input] {
            forget_gradients(*module);
            const auto loss = module->forward(input).pow(2).mean();
            loss.backward();  // what came before the loss is gone, as in Python
          }};
}

TimedWork block_step(const std::string& what, c10::Device device, const std::optional<DeviceMesh>& mesh = std::nullopt,
                     bool is_sequence_parallel = false) {
  at::manual_seed(1);
  const auto block = std::make_shared<Block>();
  block->to(device);
  auto input = at::randn({kBatch, kLength, kWidth}).to(device);
  if (mesh) parallelize_module(*block, *mesh, block_plan(is_sequence_parallel));
  if (is_sequence_parallel) input = Layout(*mesh, {Shard(1)}, input.sizes().vec()).cut(input).contiguous();
  return step_of(what, block, input);
}

/// Calls that send nothing.
TimedWork calls(const std::string& what, std::function<void()> call) {
  return {what, [call = std::move(call)] {
            const at::NoGradGuard no_grad;
            for (int64_t i = 0; i < kCalls; ++i) call();
          }};
}

std::vector<TimedWork> dispatch(c10::Device device, const DeviceMesh& mesh) {
  const auto local = at::randn({32, 64}).to(device);
  const auto a = DTensor::from_local(local, mesh, {Shard(0)});
  const auto b = DTensor::from_local(local.clone(), mesh, {Shard(0)});
  const auto whole = DTensor::from_local(at::ones({64, 64}).to(device), mesh, {Replicate()});
  return {calls("add", [a, b] { a.tensor() + b.tensor(); }),
          calls("redistribute", [whole] { whole.redistribute({Shard(0)}); }),
          calls("redistribute-same", [a] { a.redistribute({Shard(0)}); })};
}

TimedWork local_add(c10::Device device) {
  const auto a = at::randn({32, 64}).to(device);
  const auto b = at::randn({32, 64}).to(device);
  return calls("add", [a, b] { a + b; });
}

TimedWork regions_step(bool is_checkpointed, c10::Device device) {
  at::manual_seed(1);
  const auto module = std::make_shared<Regions>(is_checkpointed);
  return step_of("regions", module, at::randn({kRegionRows, kRegionWidth}).to(device));
}

/// On the host, as is the memory that is measured. What is freed goes back at once, so that what is resident is what
/// tensors take.
TimedWork deep_step(bool is_checkpointed) {
  ::mallopt(M_MMAP_THRESHOLD, 1 << 16);
  at::manual_seed(1);
  const auto module = std::make_shared<Deep>(is_checkpointed);
  return step_of("deep", module, at::randn({kDeepRows, kDeepWidth}));
}

}  // namespace

Contender make_contender(const std::string& name, const Case&, const World& world) {
  if (name == "deep" || name == "deep-local") {
    const auto deep = deep_step(name == "deep");
    const auto peak = [run = deep.run] { return std::map<std::string, double>{{"deep-peak", peak_growth_of(run)}}; };
    return {name, {deep}, peak};
  }
  const auto device = world.device();
  if (name == "local") return {name, {block_step("block", device), regions_step(false, device), local_add(device)}};
  TORCH_CHECK(name == "ours", "unknown contender ", name);
  const auto mesh = DeviceMesh::from_group(world.group(), c10::DeviceTypeName(device.type(), /*lower_case=*/true));
  Contender ours{name,
                 {block_step("block", device, mesh), block_step("block-sequence-parallel", device, mesh, true),
                  regions_step(true, device)}};
  for (auto& each : dispatch(device, mesh)) ours.timed.push_back(std::move(each));
  return ours;
}

}  // namespace lockstep::bench
