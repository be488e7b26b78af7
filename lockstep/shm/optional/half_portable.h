// Half to float and back in plain C++, for reduce_kernels.h: where no instruction for it can be counted on.
#pragma once

#include <cstdint>

namespace lockstep::shm::detail {
namespace {

struct PortableHalf {
  static void widen(const std::uint16_t* in, float* out) {
    for (int i = 0; i < 16; ++i) out[i] = widen(in[i]);
  }
  static void narrow(const float* in, std::uint16_t* out) {
    for (int i = 0; i < 16; ++i) out[i] = narrow(in[i]);
  }

 private:
  /// `condition ? a : b` without the branches that compilers make of it, so that the loops vectorise.
  static std::uint32_t select(bool condition, std::uint32_t a, std::uint32_t b) {
    return b ^ ((a ^ b) & -static_cast<std::uint32_t>(condition));
  }

  static float widen(std::uint16_t half) {
    const std::int32_t magnitude = half & 0x7fff;
    // Multiplying moves the exponent to its place, except at the top: inf and NaN stay what they are.
    const float normal = __builtin_bit_cast(float, (magnitude << 13) + (224 << 23)) * 0x1p-112f;
    // 2^-14 (1 + m) - 2^-14: the subtraction normalises what half could only hold as subnormal.
    const float subnormal = __builtin_bit_cast(float, (magnitude << 13) + (113 << 23)) - 0x1p-14f;
    const std::uint32_t bits = select(magnitude < 1 << 10, __builtin_bit_cast(std::uint32_t, subnormal),
                                      __builtin_bit_cast(std::uint32_t, normal));
    return __builtin_bit_cast(float, (half & 0x8000u) << 16 | bits);
  }

  // To the nearest, ties to even; a NaN keeps its sign and top bits and becomes quiet. As F16C has it.
  static std::uint16_t narrow(float x) {
    const auto bits = __builtin_bit_cast(std::uint32_t, x);
    const auto magnitude = static_cast<std::int32_t>(bits & 0x7fffffffu);
    const std::int32_t normal = (magnitude - (112 << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
    // Adding 0.5 leaves units of 2^-24, half's smallest subnormal: the addition rounds.
    const float shifted = __builtin_bit_cast(float, magnitude) + 0.5f;
    const std::int32_t subnormal = __builtin_bit_cast(std::int32_t, shifted) - (126 << 23);
    const std::int32_t nan = 0x7e00 | (magnitude >> 13 & 0x3ff);
    const std::uint32_t finite = select(magnitude < 113 << 23, subnormal, normal);
    const std::uint32_t special = select(magnitude > 255 << 23, nan, 0x7c00);
    return static_cast<std::uint16_t>((bits >> 16 & 0x8000u) | select(magnitude < 143 << 23, finite, special));
  }
};

}  // namespace
}  // namespace lockstep::shm::detail
