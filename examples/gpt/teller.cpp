#include "examples/gpt/teller.h"

#include <torch/torch.h>

#include <algorithm>
#include <sstream>

namespace lockstep::examples {
namespace {

// Below 1: likely characters become likelier.
constexpr double kTemperature = 0.5;

}  // namespace

std::string tell(Gpt model, const std::string& alphabet, const TellOptions& options) {
  const at::NoGradGuard no_grad;
  auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(options.seed));
  const auto device = model->tokens->weight.device();
  const auto newline = static_cast<int64_t>(alphabet.find('\n'));
  auto tokens = torch::tensor({newline, newline}).unsqueeze(0).to(device);
  std::string text;
  for (int64_t length = 0; length < options.longest; ++length) {
    if (length >= options.shortest && text.ends_with("\n\n")) break;
    const auto seen = tokens.slice(1, std::max<int64_t>(0, tokens.size(1) - model->config.context));
    const auto scores = model->forward(seen).select(1, -1).to(at::kCPU, at::kFloat);
    const auto next = at::multinomial(at::softmax(scores / kTemperature, 1), 1, false, generator);
    tokens = at::cat({tokens, next.to(device)}, 1);
    text += alphabet[static_cast<std::size_t>(next.item<int64_t>())];
  }
  return text;
}

std::string wrap(const std::string& text, std::size_t width) {
  std::istringstream lines(text);
  std::string result;
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string column = " ";
    for (std::string word; words >> word;) {
      if (column.size() + 1 + word.size() >= width) {
        result += column + "\n";
        column = " ";
      }
      column += " " + word;
    }
    result += column == " " ? "\n" : column + "\n";
  }
  return result;
}

std::string one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

}  // namespace lockstep::examples
