#include "examples/llama/text.h"

#include <lockstep/dtensor/dtensor.h>
#include <torch/torch.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>

#include "examples/common/tales.h"

namespace lockstep::examples {
namespace {

// Below 1: likely tokens become likelier.
constexpr double kTemperature = 0.5;
constexpr std::size_t kTalesLength = 500'000;
constexpr std::uint64_t kTalesSeed = 1;

at::Tensor bytes_of(std::string text) {
  return at::from_blob(text.data(), {static_cast<int64_t>(text.size())}, at::kByte).clone();
}

/// Maps the file: it may be larger than memory.
at::Tensor numbers_in(const std::string& file, int64_t vocab_size) {
  const bool is_short = vocab_size <= std::numeric_limits<std::uint16_t>::max() + 1;
  const auto dtype = is_short ? at::kUInt16 : at::kUInt32;
  const auto count = static_cast<int64_t>(std::filesystem::file_size(file) / c10::elementSize(dtype));
  return at::from_file(file, /*shared=*/false, count, dtype);
}

/// libtorch has no max() of unsigned numbers; a file is not turned into others at once.
int64_t largest_of(const at::Tensor& tokens) {
  int64_t largest = 0;
  for (const auto& piece : tokens.split(1 << 20))
    largest = std::max(largest, piece.to(at::kLong).max().item<int64_t>());
  return largest;
}

at::Tensor tokens_of(const TextOptions& options) {
  if (!options.tokens.empty()) return numbers_in(options.tokens, options.vocab_size);
  if (options.text.empty()) return bytes_of(tell_tales(kTalesLength, kTalesSeed));
  std::ifstream in(options.text, std::ios::binary);
  return bytes_of({std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()});
}

}  // namespace

Corpus read_corpus(const TextOptions& options) {
  const auto tokens = tokens_of(options);
  TORCH_CHECK(tokens.numel() > 0, "there are no tokens in ", options.tokens, options.text);
  const auto largest = largest_of(tokens);
  TORCH_CHECK(largest < options.vocab_size, "token ", largest,
              " of the text is none of the model's, of which there are ", options.vocab_size);
  const auto training = tokens.numel() / 10 * 9;
  return {tokens.slice(0, 0, training), tokens.slice(0, training), options.context};
}

at::Tensor write(LanguageModel& model, const at::Tensor& prompt, const WriteOptions& options) {
  const at::NoGradGuard no_grad;
  // Of one seed on all ranks: where they divide layers, all have to go on with the same token.
  auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(options.seed));
  auto tokens = prompt.to(at::kLong).unsqueeze(0);
  for (int64_t i = 0; i < options.count; ++i) {
    const auto seen = tokens.slice(1, std::max<int64_t>(0, tokens.size(1) - options.context));
    auto scores = model.forward(seen).select(1, -1);
    if (is_dtensor(scores)) scores = DTensor(scores).full_tensor();
    scores = scores.to(at::kCPU, at::kFloat);
    const auto next = at::multinomial(at::softmax(scores / kTemperature, 1), 1, false, generator);
    tokens = at::cat({tokens, next.to(tokens.device())}, 1);
  }
  return tokens.squeeze(0).slice(0, prompt.numel());
}

}  // namespace lockstep::examples
