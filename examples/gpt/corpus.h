// The tales as numbers, one for each character, and the batches that are cut from them.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <string>

namespace lockstep::examples {

struct Batch {
  at::Tensor input;   // [rows, context]
  at::Tensor target;  // the same, one character later
};

/// Where sequences begin in the text.
using Starts = at::Tensor;

class Corpus {
 public:
  explicit Corpus(int64_t context);

  int64_t vocabulary() const { return static_cast<int64_t>(alphabet_.size()); }
  const std::string& alphabet() const { return alphabet_; }
  int64_t characters() const { return training_.numel(); }

  /// Of `count` random sequences of the training text.
  Starts random_starts(int64_t count, at::Generator& generator) const;
  Batch training_batch(const Starts& starts) const { return cut(training_, starts); }

  /// Of `count` sequences that are spread evenly over text that is not trained on.
  Starts validation_starts(int64_t count) const;
  Batch validation_batch(const Starts& starts) const { return cut(validation_, starts); }

 private:
  at::Tensor encode(const std::string& text) const;
  Batch cut(const at::Tensor& text, const Starts& starts) const;

  int64_t context_;
  std::string alphabet_;
  at::Tensor training_;
  at::Tensor validation_;
};

}  // namespace lockstep::examples
