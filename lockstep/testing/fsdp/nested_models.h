// NestedWrappedModule and its kin: linear layers, some of them units, units inside of units.
#pragma once

#include <torch/nn/modules/container/any.h>
#include <torch/nn/pimpl.h>

#include <chrono>
#include <memory>
#include <vector>

#include "lockstep/testing/fsdp/test_model.h"

namespace lockstep::testing {

/// Modules one behind the other by the names "0", "1", …: libtorch's Sequential cannot stand inside of another one.
class ChainImpl : public torch::nn::Module {
 public:
  template <class... Modules>
  explicit ChainImpl(const Modules&... modules) {
    (add(torch::nn::AnyModule(modules)), ...);
  }
  at::Tensor forward(const at::Tensor& input);

  std::size_t size() const { return links_.size(); }
  torch::nn::Module& at(std::size_t index) const { return *links_.at(index).ptr(); }
  at::Tensor forward_link(std::size_t index, const at::Tensor& input) { return links_.at(index).forward(input); }

 private:
  void add(torch::nn::AnyModule module);

  std::vector<torch::nn::AnyModule> links_;
};
TORCH_MODULE(Chain);

/// 8-4, (4-16, 16-16), 16-4, 4-8. The loss is the sum of the outputs, so that gradients stay simple.
class NestedWrappedModule : public FsdpTestModel {
 public:
  NestedWrappedModule(const GroupPtr& group, bool deterministic);

  /// Units: the inner 4-16, the pair it is in, 16-4. Not the model itself, which may become the root.
  static std::shared_ptr<NestedWrappedModule> init(const TestGroups& groups, const TestModelOptions& options);

  /// Uniform, 4 x 8.
  std::vector<at::Tensor> get_input(c10::Device device) override;
  at::Tensor forward(const std::vector<at::Tensor>& input) override;
  at::Tensor get_loss(const std::vector<at::Tensor>& input, const at::Tensor& output) override;

  Chain module{nullptr};

 protected:
  /// Without layers.
  explicit NestedWrappedModule(const GroupPtr& group);
  /// The chain at `index`.
  static ChainImpl& chain_at(const NestedWrappedModule& model, std::size_t index);

  const int rank_;
};

/// The same layers, all of them units, and the model too.
class AlwaysWrapNestedWrappedModule final : public NestedWrappedModule {
 public:
  using NestedWrappedModule::NestedWrappedModule;
  static std::shared_ptr<AlwaysWrapNestedWrappedModule> init(const TestGroups& groups, const TestModelOptions& options);
};

/// The last two layers in one unit, and all but the last frozen: ranks that hold nothing that is trained.
class NonUniformReqGradNWM final : public NestedWrappedModule {
 public:
  NonUniformReqGradNWM(const GroupPtr& group, bool deterministic);
  static std::shared_ptr<NonUniformReqGradNWM> init(const TestGroups& groups, const TestModelOptions& options);
};

/// 8-12, 12-23, 23-12, 12-8. The third layer is an expert: another one on every rank, in a group of its own, and never
/// averaged. Without units the model averages the gradients of the others itself after backward: wrap it in DummyDDP.
class MixtureOfExperts final : public NestedWrappedModule {
 public:
  MixtureOfExperts(const GroupPtr& group, bool deterministic, std::chrono::milliseconds delay_before_free);

  /// Units: the expert and the second layer. Collective: makes a group per rank.
  static std::shared_ptr<MixtureOfExperts> init(
      const TestGroups& groups, const TestModelOptions& options,
      std::chrono::milliseconds delay_before_free = std::chrono::milliseconds(0));

  at::Tensor forward(const std::vector<at::Tensor>& input) override;
  void run_backward(const at::Tensor& loss) override;
  static bool is_expert(const std::string& name);

 private:
  const GroupPtr group_;
  const std::chrono::milliseconds delay_before_free_;
  bool is_sharded_ = false;
};

}  // namespace lockstep::testing
