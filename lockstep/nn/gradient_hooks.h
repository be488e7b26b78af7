// Hooks on gradient accumulators: who wants to know when a parameter's gradient is there.
//
// An accumulator lives only as long as something refers to it, and a hook only as long as its accumulator: both are
// kept here. The distributed engine runs these hooks, and none of the tensor's own.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <unordered_map>
#include <vector>

#include <torch/csrc/autograd/variable.h>

namespace lockstep::detail {

/// Releases of libtorch differ in how they count references to nodes.
using NodePtr = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

class GradientHooks {
 public:
  GradientHooks() = default;
  ~GradientHooks() { remove(); }
  GradientHooks(const GradientHooks&) = delete;
  GradientHooks& operator=(const GradientHooks&) = delete;

  /// Calls on_ready(index) whenever parameters[index] has been accumulated into. What it throws comes out of backward.
  void add(const std::vector<at::Tensor>& parameters, const std::function<void(std::size_t index)>& on_ready);
  /// May be called again, and after a part of the parameters is gone.
  void remove();
  bool are_installed() const { return !hooks_.empty(); }
  /// Before a forward. A parameter may have got another accumulator since add(), one without the hook: set_() does so,
  /// and with it torch::load().
  void refresh();

  const std::unordered_map<const torch::autograd::Node*, std::size_t>& index_of_accumulator() const {
    return index_of_;
  }

 private:
  void add_one(std::size_t index);

  std::vector<at::Tensor> parameters_;
  std::function<void(std::size_t index)> on_ready_;
  std::vector<std::pair<NodePtr, std::uintptr_t>> hooks_;  // by parameter
  std::unordered_map<const torch::autograd::Node*, std::size_t> index_of_;
};

}  // namespace lockstep::detail
