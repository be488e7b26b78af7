// CRC-32C by the processor's instruction or by a table, against its definition.
#include "lockstep/base/crc32c.h"

#include <gtest/gtest.h>

#include <random>
#include <string>

namespace lockstep {
namespace {

uint32_t bit_by_bit(const std::string& bytes) {
  uint32_t crc = 0xffffffff;
  for (const unsigned char byte : bytes) {
    crc ^= byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1U) ^ ((crc & 1U) != 0 ? 0x82f63b78 : 0);
  }
  return ~crc;
}

uint32_t of(const std::string& bytes) {
  return crc32c(0, bytes.data(), bytes.size());
}

TEST(Crc32c, HasTheKnownValues) {
  EXPECT_EQ(of(""), 0);
  EXPECT_EQ(of("a"), 0xc1d04330);
  EXPECT_EQ(of("123456789"), 0xe3069283);
  // RFC 3720, B.4.
  EXPECT_EQ(of(std::string(32, '\0')), 0x8a9136aa);
  EXPECT_EQ(of(std::string(32, '\xff')), 0x62a8ab43);
  std::string up;
  std::string down;
  for (int i = 0; i < 32; ++i) {
    up += static_cast<char>(i);
    down += static_cast<char>(31 - i);
  }
  EXPECT_EQ(of(up), 0x46dd794e);
  EXPECT_EQ(of(down), 0x113fdb5c);
}

TEST(Crc32c, IsWhatItsDefinitionSays) {
  std::mt19937 random(1);
  std::string bytes(60'000, '\0');
  for (auto& byte : bytes) byte = static_cast<char>(random());
  // Around the lengths at which it goes by words, and by three runs at once.
  for (const std::size_t length : {1, 7, 8, 9, 63, 64, 4095, 4096, 12'287, 12'288, 12'289, 24'576, 24'583, 50'001}) {
    for (const std::size_t begin : {0, 1, 3, 8}) {
      const auto part = bytes.substr(begin, length);
      EXPECT_EQ(crc32c(0, bytes.data() + begin, length), bit_by_bit(part)) << length << " from " << begin;
    }
  }
}

TEST(Crc32c, GoesOnWhereItEnded) {
  std::mt19937 random(2);
  std::string bytes(30'000, '\0');
  for (auto& byte : bytes) byte = static_cast<char>(random());
  for (int round = 0; round < 200; ++round) {
    const auto cut = random() % (bytes.size() + 1);
    const auto first = crc32c(0, bytes.data(), cut);
    EXPECT_EQ(crc32c(first, bytes.data() + cut, bytes.size() - cut), of(bytes));
  }
}

}  // namespace
}  // namespace lockstep
