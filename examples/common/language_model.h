// What the demos train: a model of text, which knows nothing of ranks.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

namespace lockstep::examples {

struct LanguageModel : torch::nn::Module {
  /// Token numbers, [batch, length], to the scores of the next token at each place, [batch, length, vocabulary], a
  /// DTensor if layers are divided so.
  virtual at::Tensor forward(const at::Tensor& tokens) = 0;
};

}  // namespace lockstep::examples
