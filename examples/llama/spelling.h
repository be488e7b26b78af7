// What tokens stand for, to show what a model writes. For decoding only: text comes as tokens.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace lockstep::examples {

/// Bytes by token. Tokens beyond it are shown as numbers.
using Spelling = std::vector<std::string>;

/// Every token is a byte.
Spelling spelling_of_bytes();

/// Of Hugging Face's tokenizer.json: BPE over bytes, as Llama 3 has it, or over characters with bytes to fall back on,
/// as Llama 2. Local.
Spelling read_spelling(const std::string& file);

std::string spell(const at::Tensor& tokens, const Spelling& spelling);

}  // namespace lockstep::examples
