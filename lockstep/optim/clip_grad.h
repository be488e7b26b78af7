// Clipping of gradients, by their norm and by value. Python's functions of torch.nn.utils, which here know shards:
// other ranks hold other parts of the gradients, and all clip by the norm of the whole.
//
//   clip_grad_norm_(optimizer, 1.0);      // any optimizer, whatever it has divided: nothing else to know
//   clip_grad_norm_(parameters, 1.0);     // the same for some parameters, as in Python
//   clip_grad_norm_(mine, 1.0, {.process_group = group});  // every gradient is on one rank of the group, or cut
//   clip_grad_norm_({sharded, dense}, 1.0);                // several optimizers, by one norm of all
//   clip_grad_norm_({ParameterShard{experts, {group}}, ParameterShard{shared}}, 1.0);
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <functional>
#include <initializer_list>
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
  /// To which the norm of shards is rounded. Unset: the dtype of the gradients this rank has, which others may have of
  /// another; functions that know all parameters take what all of their dtypes fit into.
  std::optional<at::ScalarType> result_dtype = std::nullopt;
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

/// Several optimizers.
using OptimizerList = std::vector<std::reference_wrapper<torch::optim::Optimizer>>;

/// By one norm of what all of them step, each divided in its own way or not at all: what every rank has counts once.
/// All ranks list the same optimizers in the same order. Takes no process_group. Collective and blocking over the
/// groups that divide gradients.
at::Tensor clip_grad_norm_(const OptimizerList& optimizers, double max_norm, const NormOptions& options = {});
void clip_grad_value_(const OptimizerList& optimizers, double clip_value, bool foreach = true);

/// The same, written in place: clip_grad_norm_({one, other}, 1.0). Also what {} means, which is nothing of any kind.
inline at::Tensor clip_grad_norm_(std::initializer_list<OptimizerList::value_type> optimizers, double max_norm,
                                  const NormOptions& options = {}) {
  return clip_grad_norm_(OptimizerList(optimizers), max_norm, options);
}
inline void clip_grad_value_(std::initializer_list<OptimizerList::value_type> optimizers, double clip_value,
                             bool foreach = true) {
  clip_grad_value_(OptimizerList(optimizers), clip_value, foreach);
}

/// Parameters that are divided alike.
struct ParameterShard {
  /// This rank's; there may be none.
  std::vector<at::Tensor> parameters = {};
  /// The groups whose ranks hold the rest, each element on one of them. None: every rank has all of them, so they count
  /// once, or they know their groups themselves.
  std::vector<GroupPtr> groups = {};
};

/// By one norm of the gradients of all lists, each summed over its own groups. All ranks list the same groups in the
/// same order. Takes no process_group. Collective and blocking over the groups.
at::Tensor clip_grad_norm_(const std::vector<ParameterShard>& lists, double max_norm, const NormOptions& options = {});

}  // namespace lockstep
