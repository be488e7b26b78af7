// Averages each gradient on its own when it is there: no buckets, no order but that of the graph, which must be the same
// on all ranks. For programs that fuse communication themselves. Internal to ddp.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
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

  /// Before every forward; see GradientHooks. Nothing is left of a backward that threw.
  void refresh_hooks() {
    hooks_.refresh();
    backward_.reset();
  }
  void add_hook(ParameterHook hook) { user_hooks_.push_back(std::move(hook)); }

 private:
  using Indices = std::vector<std::size_t>;

  void on_gradient(std::size_t index);
  /// Of a backward, in the order they come.
  void note(std::size_t index);
  /// Throws on all ranks if the backward brought other gradients to some, or in another order: sums of equal size would
  /// have been taken crosswise. Collective, at the end of each.
  void compare_orders();

  const std::vector<at::Tensor> parameters_;
  const GroupPtr group_;
  const std::function<bool()> is_enabled_;
  std::vector<ParameterHook> user_hooks_;
  GradientHooks hooks_;
  std::shared_ptr<Indices> backward_;  // from its first gradient to its end
};

}  // namespace detail
}  // namespace lockstep
