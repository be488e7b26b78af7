#include "lockstep/launch/lines.h"

#include <string>
#include <vector>

#include "tests/unit/launch/time_limit.h"

namespace lockstep {
namespace {

using Lines = std::vector<std::string>;

Lines split(std::size_t max_line_bytes, const std::vector<std::string>& pieces) {
  Lines lines;
  LineSplitter splitter(max_line_bytes);
  const auto sink = [&](std::string_view line) { lines.emplace_back(line); };
  for (const auto& piece : pieces) splitter.add(piece, sink);
  splitter.finish(sink);
  return lines;
}

TEST(LineSplitter, CutsAtNewlines) {
  EXPECT_EQ(split(100, {"a\nbc\n"}), (Lines{"a", "bc"}));
}

TEST(LineSplitter, JoinsALineThatCameInPieces) {
  EXPECT_EQ(split(100, {"a", "b", "c\nd", "\n"}), (Lines{"abc", "d"}));
}

TEST(LineSplitter, KeepsEmptyLines) {
  EXPECT_EQ(split(100, {"\n\na\n\n"}), (Lines{"", "", "a", ""}));
}

TEST(LineSplitter, DeliversALastLineWithoutNewline) {
  EXPECT_EQ(split(100, {"a\nb"}), (Lines{"a", "b"}));
}

TEST(LineSplitter, DeliversNothingForNothing) {
  EXPECT_EQ(split(100, {"", ""}), Lines{});
}

TEST(LineSplitter, CutsALineThatIsTooLong) {
  EXPECT_EQ(split(3, {"abcdefgh\ni\n"}), (Lines{"abc", "def", "gh", "i"}));
  EXPECT_EQ(split(3, {"ab", "cd", "e\n"}), (Lines{"abc", "de"}));
}

TEST(LineSplitter, DoesNotCutALineOfExactlyTheLimit) {
  EXPECT_EQ(split(3, {"abc\nabc\n"}), (Lines{"abc", "abc"}));
}

TEST(LineSplitter, KeepsBytesThatAreNotText) {
  const std::string odd("a\0b\r\xff", 5);
  EXPECT_EQ(split(100, {odd + "\n"}), Lines{odd});
}

}  // namespace
}  // namespace lockstep
