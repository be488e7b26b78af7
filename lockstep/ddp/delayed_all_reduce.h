// Gradients that are reduced together, in one piece, when the gradient of another parameter is there. The parameters
// concerned are not the reducer's. Internal to ddp.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/comm/pending.h"
#include "lockstep/nn/gradient_hooks.h"
#include "lockstep/nn/module_tensors.h"

namespace lockstep::detail {

class DelayedAllReduce : public std::enable_shared_from_this<DelayedAllReduce> {
 public:
  /// Local. A buffer per dtype and device.
  DelayedAllReduce(NamedTensors parameters, GroupPtr group);

  /// From now on: when the gradient of `trigger` is computed (and, if it is a delayed one itself, added to the others),
  /// the buffers are divided by the number of ranks and summed over them; backward does not return before.
  /// `is_backward_synced` tells of the backward that runs, if it is known.
  void attach(const at::Tensor& trigger, std::function<std::optional<bool>()> is_backward_synced);
  void detach();
  /// Before a forward: the hook follows a trigger that torch::load() or set_() gave another accumulator.
  void refresh_hooks() { accumulation_.refresh(); }
  /// After a forward with gradients. Backwards of one that is not synced stay local, unless an earlier synced forward
  /// still has none: one backward may be of both.
  void prepare_for_backward(bool is_synced);
  /// After a forward: gradients that are undefined become zeroed views of the buffers.
  void reset_gradients();
  /// Throws: buffers of gradients that are in a context of distributed autograd would have to be others.
  [[noreturn]] void refuse_context() const;

  const NamedTensors& parameters() const { return parameters_; }

 private:
  void launch();
  void wait();

  const NamedTensors parameters_;
  const GroupPtr group_;
  std::vector<at::Tensor> buffers_;
  std::vector<at::Tensor> views_;  // by parameter
  std::vector<Pending> pending_;
  at::Tensor trigger_;
  std::function<std::optional<bool>()> is_backward_synced_;
  std::optional<unsigned> hook_;
  GradientHooks accumulation_;  // of a trigger that is delayed itself
  bool is_due_ = false;         // a synced forward had no backward yet
  bool is_last_synced_ = false;
};

}  // namespace lockstep::detail
