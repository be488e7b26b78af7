// Trains a model sharded and unsharded and compares: losses, and parameters to the last bit.
//
//   test_fsdp_parity<NestedWrappedModule>(world.group());
//   test_fsdp_parity<TransformerWithSharedParams>(world.group(), {.fsdp = {.reshard_after_forward = false}});
//
// All is collective over the group. Failures are CheckFailures that name the parameter and the largest difference.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Type.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/optim/grad_scaler.h"
#include "lockstep/testing/fsdp/test_model.h"

namespace lockstep::testing {

/// Calls the model, maybe through a wrapper that it keeps alive.
using ModelForward = std::function<at::Tensor(const std::vector<at::Tensor>& input)>;

struct TrainOptions {
  /// Inputs are half, and so must the model be.
  bool use_pure_fp16 = false;
  bool autocast = false;
  double lr = 0.01;
  /// After every step: copies the state, zeroes the model, loads the copy.
  bool save_model = false;
  /// Of the sharded model this is compared with, or is.
  std::optional<MixedPrecisionPolicy> mixed_precision = std::nullopt;
  bool enable_grad_scaler = false;
  /// Without its `enabled` and `device`.
  GradScalerOptions grad_scaler = {};
};

/// SGD with momentum: Adam would hide a wrong scale of gradients. Returns the last loss, detached. Checks dtypes of
/// losses, that parameters of units with an offload_policy are in host memory, and that all units are idle in the end.
/// `forward` is the model's own if empty.
at::Tensor train_for_several_steps(FsdpTestModel& model, int num_steps, const TrainOptions& options = {},
                                   const ModelForward& forward = nullptr);

struct ParityOptions {
  FsdpInitMode fsdp_init_mode = FsdpInitMode::kRecursive;
  DeviceInitMode device_init_mode = DeviceInitMode::kBefore;
  /// Makes an unsharded model train in parallel; unset: DistributedDataParallel.
  std::function<ModelForward(const std::shared_ptr<FsdpTestModel>& model)> ref_init_fn = nullptr;
  int num_iters = 2;
  bool save_model = true;
  /// Of the sharded model. With a param_dtype the reference trains under autocast.
  FullyShardOptions fsdp = {};
  bool enable_grad_scaler = false;
  GradScalerOptions grad_scaler = {};
  bool use_pure_fp16 = false;
  /// How far parameters may be apart, relative and absolute. On a mesh of two axes sums are rounded elsewhere.
  double tolerance = 0;
};

/// Makes a model of the class under test.
using ModelInit = std::function<std::shared_ptr<FsdpTestModel>(const TestModelOptions& options)>;

/// Losses must agree to the dtype's tolerance; parameters exactly on the CPU, unless a tolerance is given; not at all
/// if they are trained in low precision. A model whose init() does not make it a unit becomes one.
void test_fsdp_parity(const TestGroups& groups, const ParityOptions& options, const std::string& model_name,
                      const ModelInit& init);

/// `own` is what Model::init() takes behind the options.
template <class Model, class... Own>
void test_fsdp_parity(const TestGroups& groups, const ParityOptions& options = {}, const Own&... own) {
  test_fsdp_parity(groups, options, c10::demangle_type<Model>(),
                   [&](const TestModelOptions& how) { return Model::init(groups, how, own...); });
}

/// Every parameter of `sharded` is a shard and equals its part of the one in `replicated`, its gradient likewise,
/// exactly or to the tolerance; both are undefined or none is. Names are the same, in the same order, once
/// `prefixes_to_ignore` are taken out of those of `sharded`. Local.
void check_sharded_parity(const torch::nn::Module& replicated, const torch::nn::Module& sharded,
                          const std::vector<std::string>& prefixes_to_ignore = {}, double tolerance = 0);

}  // namespace lockstep::testing
