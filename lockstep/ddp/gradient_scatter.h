// What can take the place of averages in .grad: of every bucket's average each rank keeps a slice, and whole gradients
// are freed as soon as they are in a bucket. ZeRO's second stage implements it, the Reducer calls it: on the threads of
// the autograd engine, one call at a time, with buckets in plan order on all ranks. Internal to ddp and zero.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <optional>
#include <vector>

namespace lockstep {

class GradientScatter {
 public:
  virtual ~GradientScatter() = default;

  /// In which gradients are reduced, if not in their parameters'.
  virtual std::optional<at::ScalarType> reduce_dtype() const { return std::nullopt; }
  /// What the buffer of a bucket must hold: its gradients, or more.
  virtual int64_t buffer_elements(std::size_t bucket) const = 0;
  /// The first of the bucket's gradients is in its .grad; afterwards all are taken from there.
  virtual void begin_bucket(std::size_t bucket) = 0;
  /// The bucket's gradients are at the beginning of `buffer`, divided. Starts the reduction; nobody touches the buffer
  /// until wait_for().
  virtual void launch(std::size_t bucket, const at::Tensor& buffer) = 0;
  /// Waits for the bucket's reduction; its buffer may be used again. What there was before the backward stays.
  virtual void wait_for(std::size_t bucket) = 0;
  /// All buckets have arrived: they are added to what there was. By parameter, in the reducer's order: whether any rank
  /// had a gradient.
  virtual void end_backward(const std::vector<bool>& is_used) = 0;
  /// The backward failed: drops what has arrived since it began.
  virtual void give_up() = 0;
};

}  // namespace lockstep
