// Computes with parameters of low precision while the real ones stay in full. Internal to ddp.
//
// Before forward every parameter points at a cast copy of itself; after backward (or after a forward that has none) it
// points at its full-precision data again and the copy is gone. Saving, stepping and looking at parameters between
// steps therefore see full precision.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/ddp/reducer.h"
#include "lockstep/nn/gradient_hooks.h"
#include "lockstep/nn/mixed_precision.h"
#include "lockstep/nn/module_tensors.h"

namespace torch::serialize {
class OutputArchive;
}

namespace lockstep::detail {

class LowPrecision {
 public:
  /// `parameters` are all that are not ignored, frozen ones too. Casts buffers at once.
  LowPrecision(const MixedPrecision& config, NamedTensors parameters, const NamedTensors& buffers);
  ~LowPrecision();
  LowPrecision(const LowPrecision&) = delete;
  LowPrecision& operator=(const LowPrecision&) = delete;

  /// Takes the reducer's hook slot, and its end of backward.
  void attach(const std::shared_ptr<Reducer>& reducer);

  /// Points the parameters at low-precision copies, unless they do.
  void cast_down();
  /// Points them at full precision again, and casts gradients up. Does nothing if they are there.
  void restore();
  bool is_low() const { return is_low_; }
  at::Tensor cast_input(const at::Tensor& input) const;

  /// The dtype gradients are computed in, if it differs from a parameter's own.
  std::optional<at::ScalarType> param_dtype() const { return config_.param_dtype; }

  /// What torch::nn::Module::save() does, with everything in full precision.
  void save(const torch::nn::Module& module, torch::serialize::OutputArchive& archive) const;

 private:
  FuturePtr reduce(GradBucket& bucket, const GroupPtr& group) const;
  void on_gradient(std::size_t index);
  at::Tensor in_full(const at::Tensor& tensor) const;

  const MixedPrecision config_;
  struct Parameter {
    std::string name;
    at::Tensor tensor;
    at::Tensor full;  // its data in full precision
  };
  std::vector<Parameter> parameters_;
  std::vector<std::pair<at::Tensor, at::ScalarType>> buffers_;  // that were cast, and what they were
  std::weak_ptr<Reducer> reducer_;
  std::vector<at::Tensor> managed_;
  // A cast parameter has another accumulator, so hooks are set anew for each step.
  GradientHooks hooks_;
  bool is_low_ = false;
  bool has_queued_restore_ = false;
};

}  // namespace lockstep::detail
