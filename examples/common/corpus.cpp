#include "examples/common/corpus.h"

#include <torch/torch.h>

#include <algorithm>
#include <utility>

namespace lockstep::examples {

Corpus::Corpus(at::Tensor training, at::Tensor validation, int64_t context)
    : training_(std::move(training)), validation_(std::move(validation)), context_(context) {
  const auto shorter = std::min(training_.numel(), validation_.numel());
  TORCH_CHECK(shorter > context_, "sequences of ", context_,
              " tokens and the one that follows need a text of more than ", context_,
              " tokens, to train on and to validate with; the shorter has ", shorter);
}

Starts Corpus::random_starts(int64_t count, at::Generator& generator) const {
  return torch::randint(0, training_.numel() - context_, {count}, generator, torch::kLong);
}

Starts Corpus::validation_starts(int64_t count) const {
  return at::arange(count) * ((validation_.numel() - context_ - 1) / count);
}

Batch Corpus::cut(const at::Tensor& text, const Starts& starts) const {
  const auto rows = text.index({starts.unsqueeze(1) + at::arange(context_ + 1)}).to(at::kLong);
  return {rows.slice(1, 0, context_), rows.slice(1, 1)};
}

}  // namespace lockstep::examples
