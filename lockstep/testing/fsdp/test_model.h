// What the models of the kit have in common: how they are made, and what a training loop asks of them. They are
// Python's (torch/testing/_internal/common_fsdp.py), with the same sizes and seeds.
//
// A model is built whole and sharded in place; its names stay what they are.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "lockstep/fsdp/fully_shard.h"
#include "lockstep/testing/seeds.h"

namespace lockstep::testing {

enum class FsdpInitMode {
  kNoFsdp,
  kRecursive,  // parts of the model are units; whether the model itself is one, its init() says
};

/// When the model is moved to where the rank computes.
enum class DeviceInitMode {
  kBefore,  // before it is sharded
  kAfter,
  kNever,
};

/// The ranks of a model: one group, or two whose ranks together are a mesh.
struct TestGroups {
  GroupPtr shard;
  GroupPtr replicate = nullptr;

  // NOLINTNEXTLINE(google-explicit-constructor): most have one group
  TestGroups(GroupPtr shard_group, GroupPtr replicate_group = nullptr)
      : shard(std::move(shard_group)), replicate(std::move(replicate_group)) {}
  /// One axis, or "replicate" and "shard". With two groups collective over `replicate`.
  DeviceMesh mesh() const;
};

struct TestModelOptions {
  FsdpInitMode fsdp_init_mode = FsdpInitMode::kNoFsdp;
  DeviceInitMode device_init_mode = DeviceInitMode::kBefore;
  /// Of every unit. Without a mesh: one over the groups.
  FullyShardOptions fsdp = {};
  /// The same in every build. Otherwise a build is like no other, but alike on all ranks.
  bool deterministic = false;
  /// Given: floating parameters and buffers are cast to it before the model is sharded.
  std::optional<at::ScalarType> dtype = std::nullopt;
};

/// What a training loop needs. Models have a static init(groups, options, …) as well, which returns a shared_ptr.
class FsdpTestModel : public torch::nn::Module {
 public:
  /// The same in every call, different on every rank.
  virtual std::vector<at::Tensor> get_input(c10::Device device) = 0;
  virtual at::Tensor forward(const std::vector<at::Tensor>& input) = 0;
  virtual at::Tensor get_loss(const std::vector<at::Tensor>& input, const at::Tensor& output) = 0;
  virtual void run_backward(const at::Tensor& loss) { loss.backward(); }
};

/// Where this rank computes.
c10::Device compute_device();

/// The options with a mesh over the groups, if they have none; a hybrid strategy over one group is left to the library,
/// which makes a mesh of the hosts (shard_by_policy()).
FullyShardOptions with_mesh(FullyShardOptions options, const TestGroups& groups);

/// Moves the module in place if told to.
void move_if(bool moves, torch::nn::Module& module);
/// Makes the module a unit if told to.
void wrap_if(bool wraps, torch::nn::Module& module, const FullyShardOptions& options);

/// Runs `build` with a seeded default generator: with `seed` if deterministic, else with one that the rank's generator
/// gives.
void build_model(bool is_deterministic, const std::function<void()>& build, uint64_t seed = kModelSeed);

/// What every init() does: refuses unknown modes, casts the model, moves it before or after `shard(options)`, which is
/// called if the mode says so.
void init_model(torch::nn::Module& model, const TestGroups& groups, const TestModelOptions& options,
                const std::function<void(const FullyShardOptions& fsdp)>& shard);

}  // namespace lockstep::testing
