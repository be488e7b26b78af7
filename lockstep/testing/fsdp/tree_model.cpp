#include "lockstep/testing/fsdp/tree_model.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/tanh.h>

#include <string>
#include <utility>

#include "lockstep/checkpointing/checkpoint.h"
#include "lockstep/testing/run.h"

namespace lockstep::testing::detail {

TreeModule::TreeModule(const TreeNode& node) : node_(node) {
  const bool is_mlp = node.kind == TreeNode::Kind::kMlp;
  const auto width = is_mlp ? 3 * kWidth : kWidth;
  if (is_mlp || node.kind == TreeNode::Kind::kLinear) {
    first_ = register_module("first", torch::nn::Linear(kWidth, width));
  }
  if (is_mlp) second_ = register_module("second", torch::nn::Linear(width, kWidth));
  if (node.kind == TreeNode::Kind::kNorm) {
    norm_ = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
  }
  for (const auto& parameter : parameters()) parameter.set_requires_grad(!node.is_frozen);
  for (const auto& child : node.children) {
    children_.push_back(register_module(std::to_string(children_.size()), std::make_shared<TreeModule>(child)));
  }
}

at::Tensor TreeModule::through_children(at::Tensor value) {
  for (const auto& child : children_) value = child->forward(value);
  return value;
}

at::Tensor TreeModule::forward(const at::Tensor& input) {
  if (node_.checkpoint == TreeNode::Checkpoint::kNone) return run(input);
  // Ranks are threads, which share the default generator; there is nothing random in it.
  CheckpointOptions options{.preserve_rng_state = false};
  options.early_stop = node_.checkpoint != TreeNode::Checkpoint::kToTheEnd;
  if (node_.checkpoint == TreeNode::Checkpoint::kSelective)
    options.policy = save_operators({"aten::addmm", "aten::mm"});
  return checkpoint(options, [this](const at::Tensor& in) { return run(in); }, input);
}

at::Tensor TreeModule::run(const at::Tensor& input) {
  switch (node_.kind) {
    case TreeNode::Kind::kLinear:
      return at::tanh(first_->forward(input));
    case TreeNode::Kind::kNorm:
      return norm_->forward(input);
    case TreeNode::Kind::kMlp:
      return second_->forward(at::tanh(first_->forward(input)));
    case TreeNode::Kind::kChain:
      return through_children(input);
    case TreeNode::Kind::kResidual:
      return input + through_children(input);
    case TreeNode::Kind::kTwice:
      return through_children(through_children(input));
    case TreeNode::Kind::kIdle:
      return input;
  }
  return input;
}

void TreeModule::shard(const FullyShardOptions& options) {
  for (const auto& child : children_) child->shard(options);
  if (!node_.is_unit) return;
  auto own = options;
  own.reshard_after_forward = node_.reshard_after_forward;
  const auto ranks = options.mesh->size(options.mesh->ndim() - 1);
  const bool is_count = own.reshard_after_forward && own.reshard_after_forward->is_count();
  if (is_count && ranks % own.reshard_after_forward->ranks() != 0) own.reshard_after_forward = true;
  fully_shard(*this, own);
}

TreeModel::TreeModel(const TreeNode& node)
    : tree_(register_module("tree", std::make_shared<TreeModule>(node))),
      head_(register_module("head", torch::nn::Linear(TreeModule::kWidth, 3))) {
  to(at::kDouble);
}

at::Tensor TreeModel::forward(const at::Tensor& input) {
  const auto hidden = tree_->forward(input);
  auto output = head_->forward(hidden);
  if (std::exchange(throws_, false)) {
    const auto& place = hidden.requires_grad() ? hidden : output;
    place.register_hook([](const at::Tensor&) { throw CheckFailure("thrown on purpose"); });
  }
  return output;
}

FsdpUnit TreeModel::shard(const FullyShardOptions& options) {
  tree_->shard(options);
  return fully_shard(*this, options);
}

}  // namespace lockstep::testing::detail
