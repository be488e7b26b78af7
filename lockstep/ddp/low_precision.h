// Computes with parameters and buffers of low precision while the module's own forward runs. Internal to ddp.
//
// For that time each tensor shows a cast copy of itself; when forward leaves, by an exception too, it is what it was.
// What autograd saved meanwhile are the copies, so backward computes with them, and gradients are cast when they come
// to the parameter's accumulator. Whoever saves, steps, loads or shares a tensor meets full precision only.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "lockstep/nn/gradient_hooks.h"
#include "lockstep/nn/mixed_precision.h"
#include "lockstep/nn/module_tensors.h"
#include "lockstep/nn/saved_tensors.h"

namespace lockstep::detail {

class LowPrecision {
 public:
  /// `parameters` are all that are not ignored, frozen ones too. Local.
  LowPrecision(const MixedPrecision& config, const NamedTensors& parameters, const NamedTensors& buffers);

  /// Around the module's forward. Nests.
  void enter();
  void leave() noexcept;
  /// After leave(), unless forward threw: what it wrote in place, running means for example, is taken over in full
  /// precision. What it did not write keeps its bits.
  void keep_writes();

  at::Tensor cast_input(const at::Tensor& input) const;

 private:
  struct Cast {
    at::Tensor tensor;
    at::ScalarType to;
    bool is_buffer;
  };
  /// A tensor that shows a copy of itself.
  struct Shown {
    explicit Shown(const Cast& cast);
    Cast cast;
    at::Tensor full;
    at::Tensor low;
    int64_t version;  // before forward
    /// Made while the tensor is full, so that gradients become full too; forward's graph keeps it afterwards.
    NodePtr accumulator;
  };
  struct Forward {
    std::unique_ptr<SavesContents> saves;
    std::shared_ptr<std::vector<Shown>> shown;
    std::unique_ptr<AroundForward> around;  // for parts of it that backward runs again
  };
  class ShownAgain;

  const MixedPrecision config_;
  std::vector<Cast> casts_;
  std::vector<Forward> open_;   // the innermost last
  std::vector<Shown> written_;  // by the forward that left last
};

}  // namespace lockstep::detail
