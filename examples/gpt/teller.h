// Lets a model write text, character by character.
#pragma once

#include <cstdint>
#include <string>

#include "examples/gpt/model.h"

namespace lockstep::examples {

struct TellOptions {
  /// In characters. After the shortest it ends with the tale that is being told, at the longest anywhere.
  int64_t shortest = 350;
  int64_t longest = 900;
  int64_t seed = 1;
};

/// What `model` writes after an empty line. Local: calls the model, not its wrapper.
std::string tell(Gpt model, const std::string& alphabet, const TellOptions& options);

/// The text in lines of less than `width` columns, indented.
std::string wrap(const std::string& text, std::size_t width);

/// The text with spaces instead of line breaks.
std::string one_line(std::string text);

}  // namespace lockstep::examples
