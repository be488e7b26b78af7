// Averages each gradient on its own when it is there: no buckets, no order but that of the graph. For programs that
// fuse communication themselves. Internal to ddp.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/ddp/parameter_hook.h"
#include "lockstep/nn/gradient_hooks.h"

namespace lockstep {

namespace detail {

class PerParameterReduction {
 public:
  /// `is_enabled` is asked at every gradient.
  PerParameterReduction(std::vector<at::Tensor> parameters, GroupPtr group, std::function<bool()> is_enabled);

  /// Before every forward; see GradientHooks.
  void refresh_hooks() { hooks_.refresh(); }
  void add_hook(ParameterHook hook) { user_hooks_.push_back(std::move(hook)); }

 private:
  void on_gradient(std::size_t index);

  const std::vector<at::Tensor> parameters_;
  const GroupPtr group_;
  const std::function<bool()> is_enabled_;
  std::vector<ParameterHook> user_hooks_;
  GradientHooks hooks_;
};

}  // namespace detail
}  // namespace lockstep
