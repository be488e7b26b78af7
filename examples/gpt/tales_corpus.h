// The tales as numbers, one for each character.
#pragma once

#include <cstdint>
#include <string>

#include "examples/common/corpus.h"

namespace lockstep::examples {

struct TalesCorpus {
  std::string alphabet;  // a token is a place in it
  Corpus corpus;
};

TalesCorpus make_tales_corpus(int64_t context);

}  // namespace lockstep::examples
