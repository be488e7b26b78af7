// Deferred init: any module built without memory, and given memory and values later, in whole or part by part, with the
// bits of an ordinary build from the same seed.
//
//   torch::manual_seed(0);
//   auto model = lockstep::deferred_init([] { return Transformer(options); });   // no memory
//   for (auto& block : *model->blocks) lockstep::materialize_module(*block);     // one by one
//   lockstep::materialize_module(*model);                                        // the rest
//
// docs/intercept.md says how, what cannot be deferred, and what order costs.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <memory>

namespace torch::nn {
class Module;
}

namespace lockstep {

struct DeferredInitOptions {
  /// Of tensors for which the program names no device.
  at::Device device = at::kCPU;
};

/// While it lives, tensors the thread makes have sizes and dtypes but no memory: they are on the meta device, and what
/// gives them values is recorded. Tensors that had memory before keep it, and so does what is computed from them
/// alone. Inside of another such scope it has no effect. Local.
class DeferredInitScope {
 public:
  explicit DeferredInitScope(DeferredInitOptions options = {});
  ~DeferredInitScope();
  DeferredInitScope(const DeferredInitScope&) = delete;
  DeferredInitScope& operator=(const DeferredInitScope&) = delete;

 private:
  struct Build;
  std::unique_ptr<Build> build_;
};

/// Runs `build` inside of a DeferredInitScope and returns what it returns. Local.
template <class Build>
auto deferred_init(const Build& build, DeferredInitOptions options = {}) {
  const DeferredInitScope scope(options);
  return build();
}

/// Whether `tensor` was made inside of a DeferredInitScope and has no memory yet. Local.
bool is_deferred(const at::Tensor& tensor);

/// Gives `tensor` its memory and its value, in place: all handles see it. Tensors that share its storage share the
/// memory. Does nothing if it has memory. Local.
void materialize_tensor(const at::Tensor& tensor);

/// Gives `tensor`, which is on the meta device and not deferred, memory on `device`, in place; its values are not set.
/// Local.
void materialize_empty(const at::Tensor& tensor, at::Device device);

struct MaterializeOptions {
  bool recurse = true;  // or only what the module itself registers
};

/// materialize_tensor() for all parameters and buffers of `module`. Local.
void materialize_module(const torch::nn::Module& module, MaterializeOptions options = {});

/// Of what a holder or pointer points to.
template <class Holder>
  requires requires(const Holder& module) { materialize_module(*module, MaterializeOptions()); }
void materialize_module(const Holder& module, MaterializeOptions options = {}) {
  materialize_module(*module, options);
}

}  // namespace lockstep
