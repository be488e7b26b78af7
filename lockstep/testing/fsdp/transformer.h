// TransformerWithSharedParams: tied weights, buffers of two dtypes, integer inputs, maybe a BatchNorm; units in the
// middle and parameters of the root on both sides of them.
#pragma once

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/transformer.h>

#include <memory>
#include <optional>
#include <vector>

#include "lockstep/fsdp/policies.h"
#include "lockstep/testing/fsdp/test_model.h"

namespace lockstep::testing {

struct TransformerOptions {
  /// Encoder and decoder layers if unset.
  std::optional<WrapPolicy> auto_wrap_policy = std::nullopt;
  bool add_bn = true;
};

class TransformerWithSharedParams final : public FsdpTestModel {
 public:
  /// Words 23, width 16, two layers each. A deterministic one is in eval mode.
  TransformerWithSharedParams(const GroupPtr& group, bool add_bn, bool deterministic);

  /// A recursive one is sharded by the policy, the model itself being the root.
  static std::shared_ptr<TransformerWithSharedParams> init(const TestGroups& groups, const TestModelOptions& options,
                                                           const TransformerOptions& own = {});

  /// Source words 0 to 11 as 6 x 2, target words 0 to 7 as 4 x 2.
  std::vector<at::Tensor> get_input(c10::Device device) override;
  at::Tensor forward(const std::vector<at::Tensor>& input) override;
  /// Cross-entropy with the target words, summed.
  at::Tensor get_loss(const std::vector<at::Tensor>& input, const at::Tensor& output) override;

  /// The transformer, for tests of ignored modules.
  std::vector<std::shared_ptr<torch::nn::Module>> get_ignored_modules() const;

  torch::nn::Embedding embed_tokens{nullptr};
  torch::nn::Transformer transformer{nullptr};
  torch::nn::Linear output_proj{nullptr};
  at::Tensor vocab_bias;
  at::Tensor long_buffer;
  torch::nn::BatchNorm1d bn{nullptr};  // null without one

 private:
  at::Tensor run_transformer(const at::Tensor& source, const at::Tensor& target);
};

}  // namespace lockstep::testing
