// Clipping of gradients, by their norm and by value. Python's functions of torch.nn.utils, which here know shards:
// other ranks hold other parts of the gradients, and all clip by the norm of the whole.
//
//   clip_grad_norm_(optimizer, 1.0);      // any optimizer, whatever it has divided: nothing else to know
//   clip_grad_norm_(parameters, 1.0);     // the same for some parameters, as in Python
//   clip_grad_norm_(mine, 1.0, {.process_group = group});  // every gradient is on one rank of the group, or cut
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <optional>
#include <vector>

#include "lockstep/optim/sharded_gradients.h"

namespace torch::optim {
class Optimizer;
}

namespace lockstep {

struct NormOptions {
  /// As of torch.linalg.vector_norm: 2, 1, infinity, …
  double norm_type = 2.0;
  /// Throws if the norm is infinite or NaN; on all ranks, if it is that of shards.
  bool error_if_nonfinite = false;
  /// False: tensor by tensor.
  bool foreach = true;
  /// Given: every element of the gradients is on exactly one rank of the group, and the norm is that of all. Every rank
  /// must call, those without gradients too. Null is refused: it is what new_group() gives to ranks that are
  /// not in it.
  std::optional<GroupPtr> process_group = std::nullopt;
  /// In which it is computed, before it is rounded to the gradients' own. Given kDouble it has, but for one time in
  /// millions, the same bits however gradients are divided. Unset: the gradients' own, as in Python.
  std::optional<at::ScalarType> dtype = std::nullopt;
  /// Where the norm is if there is no gradient; ranks with none need it if the group does.
  c10::Device device = at::kCPU;
};

/// The norm of the norms of the tensors: that of one vector with all their elements. Zero if there are none. Collective
/// and blocking if a group is given.
at::Tensor get_total_norm(const std::vector<at::Tensor>& tensors, const NormOptions& options = {});

/// The same over shards that are divided differently: each over its own groups, gradients without groups counted once.
/// Takes no process_group. Collective and blocking over the groups, in the order of the shards.
at::Tensor get_total_norm_of_shards(const std::vector<GradientShard>& shards, const NormOptions& options = {});

/// Multiplies the parameters' gradients by max_norm / total_norm if that is less than 1. Local.
void clip_grads_with_norm_(const std::vector<at::Tensor>& parameters, double max_norm, const at::Tensor& total_norm,
                           bool foreach = true);

/// The same for gradients that are not in .grad. Local.
void scale_to_norm_(const std::vector<at::Tensor>& gradients, double max_norm, const at::Tensor& total_norm,
                    bool foreach = true);

/// Norm and clipping in one. Returns the norm before. Nothing is changed if it throws. Where gradients are divided and
/// .grad is a stand-in (ZeroStage::kGradients) it is collective and blocking over the groups they are divided over.
at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm, const NormOptions& options = {});

/// Clips what the optimizer's next step uses, wherever that is: a ShardedGradients knows, and then takes no
/// process_group and is collective and blocking over its groups; of any other optimizer it is the .grad of all its
/// parameters.
at::Tensor clip_grad_norm_(torch::optim::Optimizer& optimizer, double max_norm, const NormOptions& options = {});

/// Limits every element of the parameters' gradients to [-clip_value, clip_value]. Local: shards need nothing else.
void clip_grad_value_(const std::vector<at::Tensor>& parameters, double clip_value, bool foreach = true);

/// The same for what the optimizer's next step uses. Local.
void clip_grad_value_(torch::optim::Optimizer& optimizer, double clip_value, bool foreach = true);

}  // namespace lockstep
