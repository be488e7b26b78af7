#include "examples/common/strategy.h"

#include <lockstep/nn/tied_parameters.h>
#include <torch/torch.h>

#include <algorithm>
#include <string>
#include <utility>

namespace lockstep::examples {
namespace {

// Ranks that divide layers, or a hybrid mesh's model, among them. There are as many copies as there are such pairs.
constexpr int64_t kPair = 2;

std::string kind_of(const World& world) {
  return c10::DeviceTypeName(world.device().type(), /*lower_case=*/true);
}

DeviceMesh pairs_of(const World& world, const std::string& parallel, std::vector<std::string> names) {
  const int64_t ranks = world.world_size();
  const auto dividing = std::min(kPair, ranks);
  TORCH_CHECK(ranks % dividing == 0, "--parallel ", parallel, " divides between ", dividing,
              " ranks, of which there are ", ranks, ". Start an even number of ranks.");
  return init_device_mesh(kind_of(world), {ranks / dividing, dividing}, {.mesh_dim_names = std::move(names)});
}

/// Every rank cuts the values it has: all have built the model from one seed.
void divide_layers(const Divisible& divisible, const DeviceMesh& mesh) {
  parallelize_module(divisible.model, mesh, divisible.layers, {.src_data_rank = std::nullopt});
}

optim::AdamW make_optimizer(const TrainingOptions& options, const torch::nn::Module& model) {
  return optim::AdamW(unique_parameters(model), {.lr = options.learning_rate, .weight_decay = 0.01});
}

/// Every rank has the whole model; ZeRO divides the optimizer's state, and gradients if asked for.
class Replicated final : public Strategy {
 public:
  Replicated(const World& world, const TrainingOptions& options, const Divisible& divisible)
      : ddp_(filled(divisible), world.group(), {.bucket_cap_mb = divisible.bucket_cap_mb}),
        optimizer_(unique_parameters(*divisible.model), {.lr = options.learning_rate, .weight_decay = 0.01},
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

 private:
  static std::shared_ptr<LanguageModel> filled(const Divisible& divisible) {
    divisible.fill(*divisible.model);
    return divisible.model;
  }

  DistributedDataParallel<std::shared_ptr<LanguageModel>> ddp_;
  ZeroRedundancyOptimizer<optim::AdamW> optimizer_;
  const GroupPtr group_;
  const bool is_alone_;
};

/// Every rank has a part of every layer, and all see the same rows.
class Divided final : public Strategy {
 public:
  Divided(const World& world, const TrainingOptions& options, const Divisible& divisible)
      : model_(divisible.model),
        mesh_(init_device_mesh(kind_of(world), {1, world.world_size()}, {.mesh_dim_names = {"dp", "tp"}})) {
    divide_layers(divisible, mesh_["tp"]);
    divisible.fill(*model_);
    optimizer_.emplace(make_optimizer(options, *model_));
  }

  at::Tensor forward(const at::Tensor& input) override { return model_->forward(input); }
  void backward(const at::Tensor& loss, int64_t /*rows*/) override { loss.backward(); }
  torch::optim::Optimizer& optimizer() override { return *optimizer_; }
  GroupPtr data_group() const override { return mesh_["dp"].get_group(); }

 private:
  std::shared_ptr<LanguageModel> model_;
  DeviceMesh mesh_;
  std::optional<optim::AdamW> optimizer_;
};

/// Every rank has a part of all: each block is gathered while it computes. With tensor parallelism the block that is
/// gathered is itself one rank's part of the layers.
class Sharded final : public Strategy {
 public:
  Sharded(const World& world, const TrainingOptions& options, const Divisible& divisible)
      : model_(divisible.model),
        data_group_(world.group()),
        root_(shard(divisible, sharding_options(world, options, divisible))),
        optimizer_(make_optimizer(options, *model_)) {}

  at::Tensor forward(const at::Tensor& input) override { return model_->forward(input); }
  void backward(const at::Tensor& loss, int64_t rows) override { root_.backward(loss, static_cast<double>(rows)); }
  torch::optim::Optimizer& optimizer() override { return optimizer_; }
  GroupPtr data_group() const override { return data_group_; }

 private:
  FullyShardOptions sharding_options(const World& world, const TrainingOptions& options, const Divisible& divisible) {
    FullyShardOptions sharding;
    if (options.parallel == "hybrid") {
      sharding.mesh = pairs_of(world, options.parallel, {"replicate", "shard"});
    } else if (options.parallel == "fsdp+tp") {
      const auto mesh = pairs_of(world, options.parallel, {"dp", "tp"});
      divide_layers(divisible, mesh["tp"]);
      sharding.mesh = mesh["dp"];
      data_group_ = mesh["dp"].get_group();
    } else {
      sharding.mesh = DeviceMesh::from_group(world.group(), kind_of(world));
    }
    // The sum of many small gradients needs more digits than they do.
    if (options.precision == "bf16") sharding.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
    return sharding;
  }

  static FsdpUnit shard(const Divisible& divisible, const FullyShardOptions& options) {
    for (const auto& block : divisible.blocks) fully_shard(*block, options);
    const auto root = fully_shard(divisible.model, options);
    divisible.fill(*divisible.model);
    return root;
  }

  std::shared_ptr<LanguageModel> model_;
  GroupPtr data_group_;
  FsdpUnit root_;
  optim::AdamW optimizer_;
};

}  // namespace

void fill_one_by_one(const torch::nn::Module& model) {
  for (const auto& parameter : model.parameters()) materialize_tensor(parameter);
}

int64_t ranks_per_layer(const World& world, const TrainingOptions& options) {
  if (options.parallel == "tp") return world.world_size();
  return options.parallel == "fsdp+tp" ? std::min<int64_t>(kPair, world.world_size()) : 1;
}

std::unique_ptr<Strategy> make_strategy(const World& world, const TrainingOptions& options,
                                        const Divisible& divisible) {
  if (options.parallel == "tp") return std::make_unique<Divided>(world, options, divisible);
  if (options.is_sharded()) return std::make_unique<Sharded>(world, options, divisible);
  return std::make_unique<Replicated>(world, options, divisible);
}

}  // namespace lockstep::examples
