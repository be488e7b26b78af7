// Clipping of gradients, by their norm and by value. Python's functions of torch.nn.utils, which here know shards:
// other ranks hold other parts of the gradients, and all clip by the norm of the whole.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <functional>
#include <optional>
#include <vector>

namespace lockstep {

enum class ShardReduce { kSum, kMax, kMin };

/// Combines a number over the ranks, in place, so that all have the same: an all_reduce of the group that holds the
/// shards. Collective.
using ShardReduction = std::function<void(at::Tensor& value, ShardReduce operation)>;

struct NormOptions {
  /// As of torch.linalg.vector_norm: 2, 1, infinity, …
  double norm_type = 2.0;
  /// Throws if the norm is infinite or NaN; on all ranks, if it is that of shards.
  bool error_if_nonfinite = false;
  /// False: tensor by tensor.
  bool foreach = true;
  /// Given: every gradient is on exactly one rank, whole or in parts, and the norm is that of all. Every rank must
  /// call, those without gradients too.
  ShardReduction over_shards = nullptr;
  /// Where the norm is if there is no gradient; ranks with none need it if the reduction does.
  c10::Device device = at::kCPU;
};

/// The norm of the norms of the tensors: that of one vector with all their elements. Zero if there are none.
at::Tensor get_total_norm(const std::vector<at::Tensor>& tensors, const NormOptions& options = {});

/// Multiplies the parameters' gradients by max_norm / total_norm if that is less than 1. Local.
void clip_grads_with_norm_(const std::vector<at::Tensor>& parameters, double max_norm, const at::Tensor& total_norm,
                           bool foreach = true);

/// The same for gradients that are not in .grad. Local.
void scale_to_norm_(const std::vector<at::Tensor>& gradients, double max_norm, const at::Tensor& total_norm,
                    bool foreach = true);

/// Both. Returns the norm before. Nothing is changed if it throws.
at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm, const NormOptions& options = {});

/// Limits every element of the parameters' gradients to [-clip_value, clip_value]. Local: shards need nothing else.
void clip_grad_value_(const std::vector<at::Tensor>& parameters, double clip_value, bool foreach = true);

}  // namespace lockstep
