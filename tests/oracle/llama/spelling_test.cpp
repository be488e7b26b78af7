// What tokens stand for, compared with Hugging Face's tokenizers.
#include "examples/llama/spelling.h"

#include <fstream>

#include "lockstep/testing/gtest.h"
#include "tests/support/oracle_reference.h"

namespace lockstep {
namespace {

using oracle::at_key;

TEST(SpellingOracle, DecodesAsTokenizersDoes) {
  const auto cases = oracle::run_reference("llama/spelling_reference.py");
  if (cases.isNone()) GTEST_SKIP() << "there is no Python with tokenizers to compare with";
  for (const auto& entry : cases.toGenericDict()) {
    const testing::TempDir folder;
    const auto file = folder.file("tokenizer.json");
    std::ofstream(file) << at_key(entry.value(), "json").toStringRef();
    const auto text = examples::spell(at_key(entry.value(), "tokens").toTensor(), examples::read_spelling(file));
    EXPECT_EQ(text, at_key(entry.value(), "text").toStringRef()) << entry.key();
  }
}

}  // namespace
}  // namespace lockstep
