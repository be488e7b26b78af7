// Copies gradients into buckets when backward has computed them, divided. Internal to ddp.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "lockstep/ddp/bucket.h"
#include "lockstep/ddp/gradient_sink.h"
#include "lockstep/ddp/reducer_setup.h"

namespace lockstep::detail {

class GradientIntake {
 public:
  /// `setup` outlives it.
  explicit GradientIntake(const ReducerSetup& setup) : setup_(setup) {}

  /// The gradient of the member at `place` is there; throws, naming the parameter, if it is none for this bucket.
  void take(Bucket& bucket, std::size_t place, const StepTerms& terms, GradientSink& sink);
  /// A gradient of zeros for every member, whose own, of an earlier step, is dropped.
  void take_zeros(Bucket& bucket, const StepTerms& terms, GradientSink& sink);
  /// What there is of gradients, zeros for members without one.
  void take_leftovers(Bucket& bucket, const StepTerms& terms, GradientSink& sink);
  /// The bucket is full: copies and divides what was put off, all at once. Before it the current stream waits for those
  /// that gradients come from.
  void copy_deferred(Bucket& bucket, const StepTerms& terms);

 private:
  void take_dense(Bucket& bucket, std::size_t place, const StepTerms& terms, const GradientSink& sink);
  /// Whether its copy waits for the bucket's last gradient. Elsewhere than on the CPU one operation for all is cheaper.
  bool puts_off(const at::Tensor& grad, const at::Tensor& view) const;
  void take_sparse(Bucket& bucket, const StepTerms& terms);
  at::Tensor over_known_rows(const at::Tensor& gradient, const at::Tensor& rows, const std::string& name) const;
  void check_gradient(const Bucket& bucket, std::size_t place, const at::Tensor& grad);

  const ReducerSetup& setup_;
  bool has_warned_of_strides_ = false;
};

}  // namespace lockstep::detail
