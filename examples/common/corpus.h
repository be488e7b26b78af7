// Text as numbers of tokens, and the batches that are cut from it.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

namespace lockstep::examples {

struct Batch {
  at::Tensor input;   // [rows, context]
  at::Tensor target;  // the same, one token later
};

/// Where sequences begin in the text.
using Starts = at::Tensor;

class Corpus {
 public:
  /// Each of one dim, of any integer dtype, and longer than `context`; validation is not trained on.
  Corpus(at::Tensor training, at::Tensor validation, int64_t context);

  int64_t context() const { return context_; }
  const at::Tensor& training() const { return training_; }
  const at::Tensor& validation() const { return validation_; }

  /// Of `count` random sequences of the training text.
  Starts random_starts(int64_t count, at::Generator& generator) const;
  Batch training_batch(const Starts& starts) const { return cut(training_, starts); }

  /// Of `count` sequences that are spread evenly over text that is not trained on.
  Starts validation_starts(int64_t count) const;
  Batch validation_batch(const Starts& starts) const { return cut(validation_, starts); }

 private:
  Batch cut(const at::Tensor& text, const Starts& starts) const;

  at::Tensor training_;
  at::Tensor validation_;
  int64_t context_;
};

}  // namespace lockstep::examples
