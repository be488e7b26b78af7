// Training runs that differ in how their state is divided, and not in its values: what tests of checkpoints save in one
// layout and load in another.
#pragma once

#include <torch/torch.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/checkpoint/load.h"
#include "lockstep/checkpoint/save.h"
#include "lockstep/ddp/distributed_data_parallel.h"
#include "lockstep/fsdp/flat_pieces.h"
#include "lockstep/fsdp/fully_shard.h"
#include "lockstep/nn/tied_parameters.h"
#include "lockstep/optim/optimizers.h"
#include "lockstep/shard/layout_of.h"
#include "lockstep/testing/gtest.h"
#include "lockstep/tp/parallelize_module.h"
#include "lockstep/zero/zero_redundancy_optimizer.h"

namespace lockstep::checkpoint_runs {

/// Sizes that neither two nor three ranks divide evenly, a buffer of counts, one element and a tied weight.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    register_module("conv", conv);
    register_module("norm", norm);
    register_module("up", up);
    register_module("down", down);
    scale = register_parameter("scale", at::ones({1}));
    register_parameter("tied", norm->bias);
  }
  at::Tensor forward(const at::Tensor& input) {
    const auto seen = norm(conv(input)).mean({2, 3});
    return seen + scale * down(at::tanh(up(seen)));
  }
  torch::nn::Conv2d conv{torch::nn::Conv2dOptions(2, 5, 3)};
  torch::nn::BatchNorm2d norm{5};
  torch::nn::Linear up{5, 7};
  torch::nn::Linear down{7, 5};
  at::Tensor scale;
};
TORCH_MODULE(Net);

inline Net net(uint64_t seed) {
  static std::mutex mutex;  // rank threads share the generator
  const std::lock_guard lock(mutex);
  torch::manual_seed(seed);
  Net made;
  const at::NoGradGuard no_grad;
  for (auto& buffer : made->buffers()) {
    if (buffer.is_floating_point()) buffer.normal_();
  }
  return made;
}

/// Of a whole parameter. Eighths, so that sums and products are exact: kernels round elements at the end of a row
/// otherwise than those in its middle.
inline at::Tensor whole_values(const std::string& name, at::IntArrayRef sizes) {
  const auto generator = at::detail::createCPUGenerator(std::hash<std::string>()(name) & 0xffffU);
  return at::randint(-16, 16, sizes, generator, at::TensorOptions(at::kFloat)) / 8;
}

/// The same for whatever part of the parameters a rank has; `suffix` makes others.
inline std::vector<at::Tensor> values_for(const torch::nn::Module& model, const std::string& suffix) {
  const auto flat = detail::flat_pieces(model);
  std::vector<at::Tensor> values;
  for (const auto& item : model.named_parameters()) {
    const auto layout = layout_of(item.value());
    auto whole = whole_values(item.key() + suffix, layout ? at::IntArrayRef(layout->sizes()) : item.value().sizes());
    if (const auto found = flat.find(item.value().unsafeGetTensorImpl()); found != flat.end()) {
      for (const auto& piece : found->second) piece.in(whole).copy_(whole_values(piece.name + suffix, piece.sizes));
    }
    const auto own = layout ? layout->cut(whole) : whole;
    values.push_back(at::empty_strided(item.value().sizes(), item.value().strides()).copy_(own));
  }
  return values;
}

inline optim::AdamWOptions optimizer_options() {
  return {.lr = 0.01, .betas = {0.5, 0.5}, .weight_decay = 0.1};
}

/// A step, and parameters that anybody can compute.
inline void step(const Net& model, torch::optim::Optimizer& optimizer) {
  auto parameters = model->parameters();
  const auto gradients = values_for(*model, " gradient");
  for (std::size_t i = 0; i < parameters.size(); ++i) parameters[i].mutable_grad() = gradients[i];
  optimizer.step();
  optimizer.zero_grad();
  const at::NoGradGuard no_grad;
  const auto values = values_for(*model, "");
  for (std::size_t i = 0; i < parameters.size(); ++i) parameters[i].copy_(values[i]);
}

inline const std::vector<std::string>& layouts() {
  static const std::vector<std::string> kLayouts = {
      "plain", "ddp", "zero parameters", "zero elements", "fsdp", "fsdp flat", "hybrid", "tp", "2-D"};
  return kLayouts;
}

/// A model and its optimizer, divided in one of these ways over all ranks.
class TrainingRun {
 public:
  TrainingRun(const std::string& layout, const World& world, uint64_t seed) : model(net(seed)) {
    const int64_t ranks = world.world_size();
    const int64_t half = ranks % 2 == 0 ? 2 : 1;
    const auto mesh = [&](int64_t rows, int64_t columns, const char* one, const char* other) {
      return init_device_mesh("cpu", {rows, columns}, {.mesh_dim_names = {one, other}});
    };
    const ParallelPlan plan = {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}};
    if (layout == "fsdp") shard({.mesh = DeviceMesh::from_group(world.group(), "cpu")});
    if (layout == "fsdp flat") {
      fully_shard(*model->down, {.mesh = DeviceMesh::from_group(world.group(), "cpu"), .use_orig_params = false});
      shard({.mesh = DeviceMesh::from_group(world.group(), "cpu")});
    }
    if (layout == "hybrid") shard({.mesh = mesh(half, ranks / half, "replicate", "shard")});
    if (layout == "tp") parallelize_module(*model, init_device_mesh("cpu", {ranks}, {.mesh_dim_names = {"tp"}}), plan);
    if (layout == "2-D") {
      const auto both = mesh(ranks / half, half, "dp", "tp");
      parallelize_module(*model, both["tp"], plan);
      shard({.mesh = both["dp"]});
    }
    if (layout.starts_with("zero")) {
      // Elements are divided in the order in which they lie in memory.
      model->conv->weight.set_data(model->conv->weight.contiguous(at::MemoryFormat::ChannelsLast));
    }
    const auto options = optimizer_options();
    if (layout == "ddp" || layout.starts_with("zero")) ddp.emplace(model, world.group());
    if (layout.starts_with("zero")) {
      const auto partition = layout == "zero elements" ? ZeroPartition::kElements : ZeroPartition::kParameters;
      optimizer = std::make_unique<ZeroRedundancyOptimizer<optim::AdamW>>(
          unique_parameters(*model), options, ZeroOptions{.process_group = world.group(), .partition = partition});
    } else {
      optimizer = std::make_unique<optim::AdamW>(unique_parameters(*model), options);
    }
  }

  void step() { checkpoint_runs::step(model, *optimizer); }

  dcp::State state() {
    dcp::State state;
    ddp ? state.add("model", *ddp) : state.add("model", model);
    state.add("optimizer", *optimizer, *model);
    return state;
  }

  Net model;
  std::optional<DistributedDataParallel<Net>> ddp;
  std::unique_ptr<torch::optim::Optimizer> optimizer;

 private:
  void shard(const FullyShardOptions& options) {
    fully_shard(*model->up, options);
    fully_shard(*model, options);
  }
};

}  // namespace lockstep::checkpoint_runs
