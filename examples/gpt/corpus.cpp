#include "examples/gpt/corpus.h"

#include <torch/torch.h>

#include <set>
#include <vector>

#include "examples/gpt/tales.h"

namespace lockstep::examples {
namespace {

// The text does not follow --seed: losses of different seeds can be compared.
constexpr std::uint64_t kTrainingSeed = 1;
constexpr std::uint64_t kValidationSeed = 2;
constexpr std::size_t kTrainingLength = 500'000;
constexpr std::size_t kValidationLength = 50'000;

}  // namespace

Corpus::Corpus(int64_t context) : context_(context) {
  const auto training = tell_tales(kTrainingLength, kTrainingSeed);
  const std::set<char> characters(training.begin(), training.end());
  alphabet_.assign(characters.begin(), characters.end());
  training_ = encode(training);
  validation_ = encode(tell_tales(kValidationLength, kValidationSeed));
}

at::Tensor Corpus::encode(const std::string& text) const {
  std::vector<int64_t> tokens;
  tokens.reserve(text.size());
  for (const char c : text) tokens.push_back(static_cast<int64_t>(alphabet_.find(c)));
  return torch::tensor(tokens);
}

Starts Corpus::random_starts(int64_t count, at::Generator& generator) const {
  return torch::randint(0, training_.numel() - context_, {count}, generator, torch::kLong);
}

Starts Corpus::validation_starts(int64_t count) const {
  return at::arange(count) * ((validation_.numel() - context_ - 1) / count);
}

Batch Corpus::cut(const at::Tensor& text, const Starts& starts) const {
  const auto rows = text.index({starts.unsqueeze(1) + at::arange(context_ + 1)});
  return {rows.slice(1, 0, context_), rows.slice(1, 1)};
}

}  // namespace lockstep::examples
