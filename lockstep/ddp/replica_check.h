// Notices replicas that drift apart: where only some ranks have loaded an optimizer's state, and after a Join scope, at
// whose end ranks that ran out of inputs take the model of the others while what a plain optimizer keeps stays behind.
// A few elements of every parameter are compared after 1, 2, 4, 8, … reduced steps: state shows at once, a learning
// rate when it changes. Internal to ddp.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/nn/module_tensors.h"

namespace lockstep::detail {

/// A few elements of every parameter, as doubles in one tensor on the first one's device.
at::Tensor sample_of(const std::vector<at::Tensor>& parameters);

/// The first parameter whose sampled elements differ by more than rounding, and one of each: "parameter 'a' is 1 and
/// 2". Empty if there is none.
std::string difference_of(const at::Tensor& one, const at::Tensor& other, const ManagedParameters& parameters);

/// Counts reductions, of which all ranks have the same number: who mirrors one counts it too.
class ReplicaCheck {
 public:
  /// All ranks have the same parameters now, but maybe not the same optimizers. Compares up to the given reduction.
  void begin(int64_t last = std::numeric_limits<int64_t>::max());
  void stop() { next_ = 0; }
  /// Before a forward with gradients: keeps a sample, if the next reduction compares. Of forwards that are not reduced
  /// the first counts: a program may change parameters on each rank by itself between it and the next, and change them
  /// back before its optimizer steps (sharpness-aware minimization).
  void prepare(const ManagedParameters& parameters, bool is_synced);
  /// A reduction begins, on a rank with inputs or on one that mirrors it. Returns how the replicas of ranks with inputs
  /// differ; empty if they do not, or are not compared now. Collective now and then, the same on all ranks.
  std::string on_reduction(const ManagedParameters& parameters, bool has_inputs, const GroupPtr& group);

 private:
  bool is_next_compared() const { return next_ != 0 && reductions_ + 1 == next_; }

  int64_t reductions_ = 0;
  int64_t next_ = 0;  // the reduction to compare at; 0: none
  int64_t last_ = 0;
  at::Tensor sample_;
  bool is_from_local_forward_ = false;
};

}  // namespace lockstep::detail
