#include "examples/gpt/tales_corpus.h"

#include <torch/torch.h>

#include <set>
#include <vector>

#include "examples/common/tales.h"

namespace lockstep::examples {
namespace {

// The text does not follow --seed: losses of different seeds can be compared.
constexpr std::uint64_t kTrainingSeed = 1;
constexpr std::uint64_t kValidationSeed = 2;
constexpr std::size_t kTrainingLength = 500'000;
constexpr std::size_t kValidationLength = 50'000;

at::Tensor encode(const std::string& text, const std::string& alphabet) {
  std::vector<int64_t> tokens;
  tokens.reserve(text.size());
  for (const char c : text) tokens.push_back(static_cast<int64_t>(alphabet.find(c)));
  return torch::tensor(tokens);
}

}  // namespace

TalesCorpus make_tales_corpus(int64_t context) {
  const auto training = tell_tales(kTrainingLength, kTrainingSeed);
  const std::set<char> characters(training.begin(), training.end());
  const std::string alphabet(characters.begin(), characters.end());
  return {alphabet, Corpus(encode(training, alphabet), encode(tell_tales(kValidationLength, kValidationSeed), alphabet),
                           context)};
}

}  // namespace lockstep::examples
