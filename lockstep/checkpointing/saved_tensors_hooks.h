// Scopes that say how autograd keeps the tensors it saves for backward. As in Python, the innermost one counts, and
// checkpoint() is one of them.
//
//   {
//     const auto scope = lockstep::save_on_cpu({.pin_memory = true});
//     loss = model->forward(x).mean();   // what is saved goes to the host
//   }
//   loss.backward();                     // and comes back
#pragma once

#include <ATen/core/Tensor.h>

#include <any>
#include <functional>
#include <memory>

namespace lockstep {

namespace detail {
class EnterSaving;
class SavingRule;
}  // namespace detail

/// Until it is destroyed, by the thread that made it, the innermost first.
class [[nodiscard]] SavedTensorsScope {
 public:
  explicit SavedTensorsScope(std::shared_ptr<detail::SavingRule> rule);
  ~SavedTensorsScope();
  SavedTensorsScope(const SavedTensorsScope&) = delete;
  SavedTensorsScope& operator=(const SavedTensorsScope&) = delete;

 private:
  std::unique_ptr<detail::EnterSaving> entered_;
};

/// `pack` is called for every tensor that is saved, without gradients, and must not change it nor return it itself: a
/// detached tensor will do. `unpack` is called with what it returned whenever backward needs the tensor, maybe by
/// another thread, and gives one of the same sizes, dtype and device.
SavedTensorsScope saved_tensors_hooks(std::function<std::any(const at::Tensor&)> pack,
                                      std::function<at::Tensor(const std::any&)> unpack);

struct SaveOnCpuOptions {
  /// In pinned memory: neither copy holds up the thread, as each is enqueued on the current stream.
  bool pin_memory = false;
};

/// Tensors on accelerators are saved on the host, and copied back when backward needs them. Tensors on the host and
/// parameters, which are there anyway, are saved as they are.
SavedTensorsScope save_on_cpu(const SaveOnCpuOptions& options = {});

}  // namespace lockstep
