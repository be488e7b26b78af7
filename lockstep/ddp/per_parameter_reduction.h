// Averages each gradient on its own: no buckets. For programs that fuse communication themselves. Internal to ddp.
//
// Gradients come in the order of the graph, which may differ between ranks, and some may come on some ranks only. So
// the ranks reduce them when backward ends, in the order of the parameters, those that any of them has.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/ddp/parameter_hook.h"
#include "lockstep/nn/gradient_access.h"
#include "lockstep/nn/gradient_hooks.h"

namespace lockstep {

namespace detail {

class PerParameterReduction {
 public:
  /// `is_synced` tells whether the backward that runs is to be reduced, as far as it has come.
  PerParameterReduction(std::vector<at::Tensor> parameters, GroupPtr group, std::function<bool()> is_synced);

  /// Before every forward; see GradientHooks.
  void refresh_hooks() { hooks_.refresh(); }
  /// Called in place of the reduction, with each gradient when it is there and the backward is known to be synced.
  void add_hook(ParameterHook hook) { user_hooks_.push_back(std::move(hook)); }

 private:
  void on_gradient(std::size_t index);
  void end_backward();
  void reduce_all();

  const std::vector<at::Tensor> parameters_;
  const GroupPtr group_;
  const std::function<bool()> is_synced_;
  std::vector<ParameterHook> user_hooks_;
  GradientHooks hooks_;

  std::mutex mutex_;                     // engine threads may race
  std::vector<bool> is_ready_;           // in this backward
  GradientAccess access_;                // its
  std::weak_ptr<const bool> is_queued_;  // autograd lets go of it when backward returns or throws
  const std::shared_ptr<const bool> life_ = std::make_shared<const bool>(true);
};

}  // namespace detail
}  // namespace lockstep
