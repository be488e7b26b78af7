#include "lockstep/base/crc32c.h"

#include <array>
#include <cstring>

namespace lockstep {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78;  // reflected

constexpr std::array<uint32_t, 256> made_table() {
  std::array<uint32_t, 256> table = {};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1U) ^ ((crc & 1U) != 0 ? kPolynomial : 0);
    table[byte] = crc;
  }
  return table;
}

uint32_t by_table(uint32_t crc, const unsigned char* bytes, std::size_t size) {
  static constexpr auto kTable = made_table();
  for (std::size_t i = 0; i < size; ++i) crc = (crc >> 8U) ^ kTable[(crc ^ bytes[i]) & 0xffU];
  return crc;
}

#if defined(__x86_64__)

/// The instruction takes three cycles but can begin in each: three runs of this length are computed side by side.
constexpr std::size_t kRun = 4096;

/// What a checksum becomes by kRun zero bytes, for each byte of it: so that runs can be joined.
std::array<std::array<uint32_t, 256>, 4> made_shifts() {
  // The effect is linear, so that of each bit says all.
  std::array<uint32_t, 32> of_bit = {};
  const std::array<unsigned char, kRun> zeros = {};
  for (uint32_t bit = 0; bit < 32; ++bit) of_bit[bit] = by_table(1U << bit, zeros.data(), kRun);
  std::array<std::array<uint32_t, 256>, 4> shifts = {};
  for (uint32_t place = 0; place < 4; ++place) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      for (uint32_t bit = 0; bit < 8; ++bit) {
        if ((byte >> bit & 1U) != 0) shifts[place][byte] ^= of_bit[8 * place + bit];
      }
    }
  }
  return shifts;
}

uint32_t shifted(uint32_t crc) {
  static const auto shifts = made_shifts();
  return shifts[0][crc & 0xffU] ^ shifts[1][crc >> 8U & 0xffU] ^ shifts[2][crc >> 16U & 0xffU] ^ shifts[3][crc >> 24U];
}

uint64_t word_at(const unsigned char* bytes) {
  uint64_t word = 0;
  std::memcpy(&word, bytes, sizeof(word));
  return word;
}

__attribute__((target("sse4.2"))) uint32_t by_instruction(uint32_t crc, const unsigned char* bytes, std::size_t size) {
  for (; size >= 3 * kRun; bytes += 3 * kRun, size -= 3 * kRun) {
    uint64_t first = crc;
    uint64_t second = 0;
    uint64_t third = 0;
    for (std::size_t i = 0; i < kRun; i += sizeof(uint64_t)) {
      first = __builtin_ia32_crc32di(first, word_at(bytes + i));
      second = __builtin_ia32_crc32di(second, word_at(bytes + kRun + i));
      third = __builtin_ia32_crc32di(third, word_at(bytes + 2 * kRun + i));
    }
    crc = shifted(shifted(static_cast<uint32_t>(first)) ^ static_cast<uint32_t>(second)) ^ static_cast<uint32_t>(third);
  }
  uint64_t wide = crc;
  for (; size >= sizeof(uint64_t); bytes += sizeof(uint64_t), size -= sizeof(uint64_t)) {
    wide = __builtin_ia32_crc32di(wide, word_at(bytes));
  }
  return by_table(static_cast<uint32_t>(wide), bytes, size);
}

#endif

}  // namespace

uint32_t crc32c(uint32_t before, const void* bytes, std::size_t size) {
  const auto* begin = static_cast<const unsigned char*>(bytes);
#if defined(__x86_64__)
  static const bool has_instruction = __builtin_cpu_supports("sse4.2") != 0;
  if (has_instruction) return ~by_instruction(~before, begin, size);
#endif
  return ~by_table(~before, begin, size);
}

}  // namespace lockstep
