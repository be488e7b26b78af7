// The model of a random program. Internal to the kit.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <memory>
#include <vector>

#include "lockstep/fsdp/fully_shard.h"
#include "lockstep/testing/fsdp/random_programs.h"

namespace lockstep::testing::detail {

class TreeModule : public torch::nn::Module {
 public:
  static constexpr int64_t kWidth = 5;

  explicit TreeModule(const TreeNode& node);
  /// In a checkpoint, if the node says so.
  at::Tensor forward(const at::Tensor& input);
  /// Makes units of the nodes that shall be some, inner ones first.
  void shard(const FullyShardOptions& options);

 private:
  at::Tensor run(const at::Tensor& input);
  at::Tensor through_children(at::Tensor value);

  const TreeNode node_;
  torch::nn::Linear first_{nullptr};
  torch::nn::Linear second_{nullptr};
  torch::nn::LayerNorm norm_{nullptr};
  std::vector<std::shared_ptr<TreeModule>> children_;
};

/// The tree and a layer behind it.
class TreeModel : public torch::nn::Module {
 public:
  explicit TreeModel(const TreeNode& node);
  at::Tensor forward(const at::Tensor& input);
  /// The next forward's backward throws when it has come to the tree, or at its begin if nothing there is trained.
  void throw_in_backward() { throws_ = true; }
  /// The model itself becomes the root.
  FsdpUnit shard(const FullyShardOptions& options);

 private:
  std::shared_ptr<TreeModule> tree_;
  torch::nn::Linear head_{nullptr};
  bool throws_ = false;
};

}  // namespace lockstep::testing::detail
