// What becomes of a full bucket, and of what the ranks make of it: averages in .grad (AllReduceSink), or a slice for
// each rank (ScatterSink). Internal to ddp.
//
// The Reducer calls it with its lock held: buckets are launched in plan order, then all are waited for, and only then
// is anything written. A failure before that is followed by give_up(), after which the step can be repeated.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <vector>

#include "lockstep/ddp/bucket.h"
#include "lockstep/ddp/unused_parameters.h"
#include "lockstep/nn/gradient_access.h"

namespace lockstep::detail {

/// How the gradients of one step are read, changed and written.
struct StepTerms {
  GradientAccess access = {};
  /// What they are multiplied by on their way into buckets.
  double scale = 1;
  /// They stay where they are; see GradientSink::is_identity().
  bool is_identity = false;
  /// Rows that sparse gradients have on all ranks together, by the parameter's name.
  std::map<std::string, at::Tensor> sparse_metadata = {};
};

class GradientSink {
 public:
  virtual ~GradientSink() = default;

  /// The bucket is new.
  virtual void set_up(Bucket& bucket) = 0;
  /// A backward begins.
  virtual void begin_backward() {}

  /// What gradients are multiplied by on their way into a bucket if their sum is to be divided by `divisor`.
  virtual double scale(double divisor) const = 0;
  /// Nobody to average with: gradients are right where they are.
  virtual bool is_identity(double divisor) const = 0;
  /// Gradients are about to be copied in. Does nothing if the bucket has a buffer.
  virtual void attach_buffer(Bucket& bucket) = 0;
  /// The gradient is in `view` now. Returns whether `grad` is to become what this made of it.
  virtual bool replace_gradient(at::Tensor& grad, const at::Tensor& view) const = 0;

  virtual void launch(Bucket& bucket) = 0;
  /// Backward still computes gradients, and the first `launched` buckets are launched: what has arrived may be used.
  /// `used` is null if no parameter can be unused.
  virtual void use_arrived(std::vector<Bucket>& /*buckets*/, std::size_t /*launched*/, const UsedMap* /*used*/) {}
  /// Waits for the bucket, and throws if something is wrong with it. Nothing is written.
  virtual void wait_for(Bucket& bucket) = 0;
  /// All buckets have arrived.
  virtual void write(std::vector<Bucket>& buckets, UsedMap* used, const StepTerms& terms) = 0;
  /// The step failed: what is under way meets nothing of the next one.
  virtual void give_up(std::vector<Bucket>& buckets, const StepTerms& terms) = 0;
};

}  // namespace lockstep::detail
