// What can take the place of averages in .grad: of every bucket's average each rank keeps a slice, and whole gradients
// are freed as soon as they are in a bucket. ZeRO's second stage implements it, the Reducer calls it: on the threads of
// the autograd engine, one call at a time, with buckets in plan order on all ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <vector>

namespace lockstep {

class GradientScatter {
 public:
  virtual ~GradientScatter() = default;

  /// What the buffer of a bucket must hold: its gradients, or more.
  virtual int64_t buffer_elements(std::size_t bucket) const = 0;
  /// The bucket's gradients are at the beginning of `buffer`, divided. Starts the reduction; nobody touches the buffer
  /// until finish().
  virtual void launch(std::size_t bucket, const at::Tensor& buffer) = 0;
  /// Waits for the bucket's reduction.
  virtual void finish(std::size_t bucket) = 0;
  /// All buckets are finished. By parameter, in the reducer's order: whether any rank had a gradient.
  virtual void end_backward(const std::vector<bool>& is_used) = 0;
  /// Drops what came since end_backward(): a backward failed. Does nothing after one that did not.
  virtual void forget() = 0;
};

}  // namespace lockstep
