// Models that are late on purpose, and one that only seems to be wrapped: for references and for showing that a wait is
// missing.
#pragma once

#include <chrono>
#include <memory>
#include <utility>
#include <vector>

#include "lockstep/nn/wrapped_module.h"
#include "lockstep/testing/fsdp/nested_models.h"

namespace lockstep::testing {

/// Where DistributedDataParallel would be: passes everything on to `module()`.
template <class M>
class DummyDDP final : public WrappedModule<M> {
 public:
  explicit DummyDDP(M module) : WrappedModule<M>("DummyDDP", std::move(module)) {}
};

struct ModelDelays {
  std::chrono::milliseconds after_loss = std::chrono::milliseconds(0);
  /// Before every reduce-scatter of run_backward().
  std::chrono::milliseconds before_reduction = std::chrono::milliseconds(0);
  /// Before every unit is freed, in forward() and run_backward().
  std::chrono::milliseconds before_reshard = std::chrono::milliseconds(0);
  /// Between run_backward() and the optimizer.
  std::chrono::milliseconds before_step = std::chrono::milliseconds(0);
};

/// Any model, with delays: on the device's stream where it has one.
class ModuleWithDelay : public FsdpTestModel {
 public:
  ModuleWithDelay(std::shared_ptr<FsdpTestModel> inner, ModelDelays delays);

  /// `own` is what Model::init() takes behind the options.
  template <class Model, class... Own>
  static std::shared_ptr<ModuleWithDelay> init(const TestGroups& groups, const TestModelOptions& options,
                                               ModelDelays delays, const Own&... own) {
    return std::make_shared<ModuleWithDelay>(Model::init(groups, options, own...), delays);
  }

  std::vector<at::Tensor> get_input(c10::Device device) override { return module->get_input(device); }
  at::Tensor forward(const std::vector<at::Tensor>& input) override;
  at::Tensor get_loss(const std::vector<at::Tensor>& input, const at::Tensor& output) override;
  void run_backward(const at::Tensor& loss) override;

  const std::shared_ptr<FsdpTestModel> module;

 private:
  const ModelDelays delays_;
};

struct NestedWrappedModuleWithDelay {
  static std::shared_ptr<ModuleWithDelay> init(
      const TestGroups& groups, const TestModelOptions& options = {.device_init_mode = DeviceInitMode::kAfter},
      ModelDelays delays = {}) {
    return ModuleWithDelay::init<NestedWrappedModule>(groups, options, delays);
  }
};

}  // namespace lockstep::testing
