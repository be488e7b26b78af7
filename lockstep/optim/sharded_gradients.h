// For optimizers whose gradients are divided among ranks, or not all in their parameters' .grad: how clip_grad_norm_(),
// clip_grad_value_() and GradScaler reach them. ZeroRedundancyOptimizer implements it. For the thread that trains.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/intercept/tensor_rule.h"

namespace lockstep {

/// Gradients that are divided alike.
struct GradientShard {
  /// This rank's; there may be none.
  std::vector<at::Tensor> gradients = {};
  /// The groups whose ranks hold the rest, each element on one of them. Two if gradients are divided along two axes of
  /// a mesh, none if this rank has all of them: then other ranks have the same, and norms count them once.
  std::vector<GroupPtr> groups = {};
};

class ShardedGradients {
 public:
  virtual ~ShardedGradients() = default;

  /// What the optimizer's next step uses on this rank, to be changed in place. All ranks list the same shards with the
  /// same groups in the same order, also where they have no gradient of one. Throws if it is too late to change them.
  virtual std::vector<GradientShard> own_gradients() = 0;

  /// What this rank counts of the norm of all gradients. Differs from own_gradients() where every rank holds all and
  /// computes a part. Throws if gradients cannot be clipped by their norm now.
  virtual std::vector<GradientShard> gradients_for_norm() { return own_gradients(); }

  /// Groups whose ranks step together: none of them may leave out a step that the others take.
  virtual std::vector<GroupPtr> stepping_groups() const { return {}; }

  /// Forgets gradients, also those that .grad only stands for. For a step that is left out.
  virtual void discard_gradients() = 0;

  /// Where norms are computed on ranks that have no gradient.
  virtual c10::Device gradient_device() const = 0;
};

/// The gradients of parameters that carry a layout (shard/layout_of.h), by the groups that divide them; those of others
/// come first, as one shard without groups. Each parameter once. The same shards on all ranks, also where there is no
/// gradient.
std::vector<GradientShard> shards_by_layout(const std::vector<at::Tensor>& parameters);

/// Gradients by how they are divided: whole ones first, as one shard without groups, then those that stand-ins stand
/// for.
std::vector<GradientShard> shards_of_gradients(const std::vector<at::Tensor>& gradients);

/// What all of the parameters' dtypes fit into, as a real one: the same on all ranks, whatever gradients they have.
std::optional<at::ScalarType> norm_dtype_of(const std::vector<at::Tensor>& parameters);

/// What is in .grad where this rank has a part of a gradient only, which its optimizer keeps elsewhere: a tensor with
/// the gradient's sizes and without memory, that answers for itself. So those who know nothing of shards either do
/// right by them or are told: zero_grad() of a module or of torch::optim::Optimizer, torch::nn::utils, a program's own
/// loop.
class GradientStandIn : public RuledTensorImpl {
 public:
  using RuledTensorImpl::RuledTensorImpl;

  /// This rank's part, to be changed in place; all ranks have the same groups. Throws if it is no gradient any more.
  virtual GradientShard shard() const = 0;
  /// Throws if the ranks cannot sum something over all parts now, because some would not take part.
  virtual void check_can_be_summed() const = 0;

  /// Null for an ordinary tensor.
  static const GradientStandIn* of(const at::Tensor& gradient) {
    if (!gradient.defined() || gradient.has_storage()) return nullptr;
    return dynamic_cast<const GradientStandIn*>(gradient.unsafeGetTensorImpl());
  }
};

}  // namespace lockstep
