// Half to float and back by the F16C instructions, for reduce_kernels.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace lockstep::shm::detail {
namespace {

struct F16cHalf {
  static void widen(const std::uint16_t* in, float* out) {
    const auto* halves = reinterpret_cast<const __m128i*>(in);
    _mm256_storeu_ps(out, _mm256_cvtph_ps(_mm_loadu_si128(halves)));
    _mm256_storeu_ps(out + 8, _mm256_cvtph_ps(_mm_loadu_si128(halves + 1)));
  }
  static void narrow(const float* in, std::uint16_t* out) {
    auto* halves = reinterpret_cast<__m128i*>(out);
    _mm_storeu_si128(halves, _mm256_cvtps_ph(_mm256_loadu_ps(in), _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128(halves + 1, _mm256_cvtps_ph(_mm256_loadu_ps(in + 8), _MM_FROUND_TO_NEAREST_INT));
  }
};

}  // namespace
}  // namespace lockstep::shm::detail
