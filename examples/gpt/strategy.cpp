#include "examples/gpt/strategy.h"

#include <lockstep/shard/gather.h>
#include <lockstep/tp/parallelize_module.h>
#include <torch/torch.h>

#include <algorithm>

namespace lockstep::examples {
namespace {

// So that the first all-reduce starts early in backward, though the model is small.
constexpr double kBucketMb = 0.5;

// Of a hybrid mesh: ranks that divide a model among them. There are as many copies of it as there are such pairs.
constexpr int64_t kSharding = 2;

std::string kind_of(const World& world) {
  return c10::DeviceTypeName(world.device().type(), /*lower_case=*/true);
}

optim::AdamWOptions optimizer_options(const Options& options) {
  return {.lr = options.learning_rate, .weight_decay = 0.01};
}

/// Every rank has the whole model; ZeRO divides the optimizer's state, and gradients if asked for.
class Replicated final : public Strategy {
 public:
  Replicated(const World& world, const Options& options, const Gpt& model)
      : ddp_(model, world.group(), {.bucket_cap_mb = kBucketMb}),
        optimizer_(ddp_.parameters(), optimizer_options(options),
                   {.stage = static_cast<ZeroStage>(options.zero_stage), .ddp = ddp_}),
        group_(world.group()),
        is_alone_(world.world_size() == 1) {
    // Every step, for the share of communication that is hidden.
    ddp_.set_ddp_runtime_logging_sample_rate(1);
  }

  at::Tensor forward(const at::Tensor& input) override { return ddp_(input); }
  void backward(const at::Tensor& loss, int64_t rows) override { ddp_.backward(loss, static_cast<double>(rows)); }
  torch::optim::Optimizer& optimizer() override { return optimizer_; }
  std::optional<double> hidden_share() const override { return is_alone_ ? std::nullopt : ddp_.overlap_share(); }
  GroupPtr data_group() const override { return group_; }
  ModuleState weights() const override {
    ModuleState state;
    for (const auto& item : ddp_.module()->named_parameters()) state.emplace(item.key(), item.value().detach());
    return state;
  }

 private:
  DistributedDataParallel<Gpt> ddp_;
  ZeroRedundancyOptimizer<optim::AdamW> optimizer_;
  const GroupPtr group_;
  const bool is_alone_;
};

/// Every block's attention by heads, its two linear layers by width; the scores by token.
ParallelPlan layers_by_width() {
  return {{"blocks.*.attention_in", ColwiseParallel({.fused_parts = 3})},
          {"blocks.*.attention_out", RowwiseParallel()},
          {"blocks.*.mlp_in", ColwiseParallel()},
          {"blocks.*.mlp_out", RowwiseParallel()},
          {"head", ColwiseParallel({.output_layouts = Replicate()})}};
}

/// Every rank has a part of every layer, and all see the same rows.
class Divided final : public Strategy {
 public:
  Divided(const World& world, const Options& options, const Gpt& model)
      : model_(model),
        mesh_(init_device_mesh(kind_of(world), {1, world.world_size()}, {.mesh_dim_names = {"dp", "tp"}})),
        optimizer_(divided(model, mesh_["tp"]), optimizer_options(options)) {}

  at::Tensor forward(const at::Tensor& input) override { return model_->forward(input); }
  void backward(const at::Tensor& loss, int64_t /*rows*/) override { loss.backward(); }
  torch::optim::Optimizer& optimizer() override { return optimizer_; }
  GroupPtr data_group() const override { return mesh_["dp"].get_group(); }
  ModuleState weights() const override {
    ModuleState state;
    for (const auto& item : model_->named_parameters()) {
      const auto layout = layout_of(item.value());
      state.emplace(item.key(), layout ? gather_whole(item.value().detach(), *layout) : item.value().detach());
    }
    return state;
  }

 private:
  static std::vector<at::Tensor> divided(const Gpt& model, const DeviceMesh& mesh) {
    parallelize_module(model, mesh, layers_by_width());
    return model->parameters();
  }

  Gpt model_;
  DeviceMesh mesh_;
  optim::AdamW optimizer_;
};

/// Every rank has a part of all: each block of the GPT is gathered while it computes. With tensor parallelism the block
/// that is gathered is itself one rank's part of the layers.
class Sharded final : public Strategy {
 public:
  Sharded(const World& world, const Options& options, const Gpt& model)
      : model_(model),
        data_group_(world.group()),
        root_(shard(sharding_options(world, options))),
        optimizer_(model->parameters(), optimizer_options(options)) {}

  at::Tensor forward(const at::Tensor& input) override { return model_->forward(input); }
  void backward(const at::Tensor& loss, int64_t rows) override { root_.backward(loss, static_cast<double>(rows)); }
  torch::optim::Optimizer& optimizer() override { return optimizer_; }
  GroupPtr data_group() const override { return data_group_; }
  ModuleState weights() const override { return full_state_dict(*model_); }

 private:
  FullyShardOptions sharding_options(const World& world, const Options& options) {
    const auto kind = kind_of(world);
    FullyShardOptions sharding;
    if (options.parallel == "hybrid") {
      const int64_t ranks = world.world_size();
      const auto dividing = std::min(kSharding, ranks);
      TORCH_CHECK(ranks % dividing == 0, "--parallel hybrid divides the model between ", dividing,
                  " ranks, of which there are ", ranks, ". Start an even number of ranks.");
      sharding.mesh = init_device_mesh(kind, {ranks / dividing, dividing}, {.mesh_dim_names = {"replicate", "shard"}});
    } else if (options.parallel == "fsdp+tp") {
      const int64_t ranks = world.world_size();
      const auto dividing = std::min(kSharding, ranks);
      TORCH_CHECK(ranks % dividing == 0, "--parallel fsdp+tp divides layers between ", dividing,
                  " ranks, of which there are ", ranks, ". Start an even number of ranks.");
      const auto mesh = init_device_mesh(kind, {ranks / dividing, dividing}, {.mesh_dim_names = {"dp", "tp"}});
      parallelize_module(model_, mesh["tp"], layers_by_width());
      sharding.mesh = mesh["dp"];
      data_group_ = mesh["dp"].get_group();
    } else {
      sharding.mesh = DeviceMesh::from_group(world.group(), kind);
    }
    // The sum of many small gradients needs more digits than they do.
    if (options.precision == "bf16") sharding.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
    return sharding;
  }

  FsdpUnit shard(const FullyShardOptions& options) {
    for (const auto& block : *model_->blocks) fully_shard(*block, options);
    return fully_shard(model_, options);
  }

  Gpt model_;
  GroupPtr data_group_;
  FsdpUnit root_;
  optim::AdamW optimizer_;
};

}  // namespace

std::unique_ptr<Strategy> make_strategy(const World& world, const Options& options, const Gpt& model) {
  if (options.parallel == "tp") return std::make_unique<Divided>(world, options, model);
  if (options.is_sharded()) return std::make_unique<Sharded>(world, options, model);
  return std::make_unique<Replicated>(world, options, model);
}

}  // namespace lockstep::examples
