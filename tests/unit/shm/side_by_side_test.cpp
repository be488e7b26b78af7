// Pieces of shared memory as one range.
#include "lockstep/shm/side_by_side.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "lockstep/shm/errors.h"
#include "lockstep/shm/pool.h"

namespace lockstep::shm {
namespace {

constexpr std::size_t kPage = 4096;

TEST(SideBySide, ShowsWhatOwnersWriteAndTakesNoWrites) {
  Pool pool(std::size_t{1} << 20);
  auto* first = pool.allocate(3 * kPage);
  auto* second = pool.allocate(2 * kPage);
  std::memset(first, 1, 3 * kPage);
  std::memset(second, 2, 2 * kPage);
  const std::vector<Span> pieces = {{second, kPage}, {first + kPage, 2 * kPage}, {second + kPage, kPage}};
  const SideBySide together(pieces);
  for (const std::size_t at : {std::size_t{0}, 3 * kPage, 4 * kPage - 1}) {
    EXPECT_EQ(together.data()[at], std::byte{2}) << at;
  }
  for (const std::size_t at : {kPage, 3 * kPage - 1}) EXPECT_EQ(together.data()[at], std::byte{1}) << at;
  first[kPage + 5] = std::byte{7};
  EXPECT_EQ(together.data()[kPage + 5], std::byte{7});
  EXPECT_DEATH(*const_cast<std::byte*>(together.data()) = std::byte{0}, "");
}

TEST(SideBySide, TakesWholePagesOnly) {
  EXPECT_TRUE(SideBySide::fits(0, kPage));
  EXPECT_TRUE(SideBySide::fits(3 * kPage, 2 * kPage));
  EXPECT_FALSE(SideBySide::fits(16, kPage));
  EXPECT_FALSE(SideBySide::fits(0, kPage + 16));
  EXPECT_FALSE(SideBySide::fits(0, 0));
}

TEST(SideBySide, SaysWhyTheKernelRefuses) {
  alignas(kPage) static std::byte own[kPage];  // shared with nobody
  const std::vector<Span> pieces = {{own, kPage}};
  try {
    const SideBySide together(pieces);
    FAIL() << "took memory that is not shared";
  } catch (const MemoryError& error) {
    EXPECT_NE(std::string(error.what()).find("mremap"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace lockstep::shm
