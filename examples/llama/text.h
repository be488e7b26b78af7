// Tokens in and out: those of files, and those that a model writes.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "examples/common/corpus.h"
#include "examples/common/language_model.h"

namespace lockstep::examples {

struct TextOptions {
  std::string tokens = "";  // a file of numbers, uint16 if `vocab_size` allows, else uint32
  std::string text = "";    // or one of bytes; without either, tales
  int64_t vocab_size = 256;
  int64_t context = 128;
};

/// The last tenth is not trained on. Refuses tokens that `vocab_size` has not. Local.
Corpus read_corpus(const TextOptions& options);

struct WriteOptions {
  int64_t count = 200;
  int64_t context = 128;  // tokens that are looked back at
  int64_t seed = 1;
};

/// What `model` writes behind `prompt`, [length]: all of it. Collective where ranks divide the model, and the same on
/// all of them.
at::Tensor write(LanguageModel& model, const at::Tensor& prompt, const WriteOptions& options);

}  // namespace lockstep::examples
