// The reductions, compiled once for each instruction set by the files in optional/. Internal.
//
// Those files use other compiler flags, so whatever is here has internal linkage and calls nothing of the standard
// library (see instruction_sets.h). Loops are `omp simd` because an output may be an input: the same element, never a
// neighbour, so iterations are independent, which the compiler cannot know.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lockstep/shm/instruction_sets.h"

namespace lockstep::shm::detail {
namespace {

/// Bytes of which any but 0 is true.
enum class Bool : std::uint8_t {};

template <typename T>
T load(T x) {
  return x;
}
inline std::uint8_t load(Bool x) {
  return x != Bool{};
}

// Integers wrap around: computed without a sign, and at least as wide as int so that promotion does not bring it back.
template <std::size_t size>
struct UnsignedOf {
  using Type = std::uint32_t;
};
template <>
struct UnsignedOf<8> {
  using Type = std::uint64_t;
};
template <typename T>
using Unsigned = typename UnsignedOf<sizeof(T)>::Type;

template <typename T>
T add(T a, T b) {
  return static_cast<T>(static_cast<Unsigned<T>>(a) + static_cast<Unsigned<T>>(b));
}
inline float add(float a, float b) {
  return a + b;
}
inline double add(double a, double b) {
  return a + b;
}

template <typename T>
T multiply(T a, T b) {
  return static_cast<T>(static_cast<Unsigned<T>>(a) * static_cast<Unsigned<T>>(b));
}
inline float multiply(float a, float b) {
  return a * b;
}
inline double multiply(double a, double b) {
  return a * b;
}

// Through double, which vectorises: a quotient of 32-bit numbers is too far from the next integer to be rounded to it.
template <typename T>
T divide(T sum, std::size_t divisor) {
  return static_cast<T>(static_cast<double>(sum) / static_cast<double>(divisor));
}
inline std::int64_t divide(std::int64_t sum, std::size_t divisor) {
  return sum / static_cast<std::int64_t>(divisor);
}
inline float divide(float sum, std::size_t divisor) {
  return sum / static_cast<float>(divisor);
}
inline double divide(double sum, std::size_t divisor) {
  return sum / static_cast<double>(divisor);
}

// An operation is finish(combine(combine(scale(x0), scale(x1)), …)).
struct Nothing {};

struct Plain {
  static Nothing factor(const ReduceTask&, std::size_t) { return {}; }
  template <typename T>
  static T scale(T x, Nothing) {
    return x;
  }
  template <typename T>
  static T finish(T x, std::size_t) {
    return x;
  }
};

template <typename T>
struct Sum : Plain {
  static T combine(T a, T b) { return add(a, b); }
};
template <typename T>
struct Avg : Sum<T> {
  static T finish(T x, std::size_t divisor) { return divide(x, divisor); }
};
template <typename T>
struct PremulSum : Sum<T> {
  static T factor(const ReduceTask& task, std::size_t input) { return static_cast<T>(task.factors[input]); }
  static T scale(T x, T factor) { return x * factor; }
};
template <typename T>
struct Product : Plain {
  static T combine(T a, T b) { return multiply(a, b); }
};
// Never, for integers.
template <typename T>
bool is_nan(T x) {
  return x != x;  // NOLINT(misc-redundant-expression)
}

// NaN wins: `a` by the second test, `b` by failing the first. No `||`: a branch would not vectorise.
template <typename T>
struct Min : Plain {
  static T combine(T a, T b) { return ((a < b) | is_nan(a)) ? a : b; }
};
template <typename T>
struct Max : Plain {
  static T combine(T a, T b) { return ((a > b) | is_nan(a)) ? a : b; }
};
template <typename T>
struct Band : Plain {
  static T combine(T a, T b) { return static_cast<T>(a & b); }
};
template <typename T>
struct Bor : Plain {
  static T combine(T a, T b) { return static_cast<T>(a | b); }
};
template <typename T>
struct Bxor : Plain {
  static T combine(T a, T b) { return static_cast<T>(a ^ b); }
};

template <typename T>
const T* input_at(const ReduceTask& task, std::size_t input, std::size_t begin) {
  return reinterpret_cast<const T*>(task.inputs[input]) + begin;
}
template <typename T>
T* output_at(const ReduceTask& task, std::size_t output, std::size_t begin) {
  return reinterpret_cast<T*>(task.outputs[output]) + begin;
}

/// Elements of the block at `begin`. In blocks, what lies between the first input and the last output stays in the L1
/// cache. An output is written after every input has been read up to there.
inline std::size_t block_count(const ReduceTask& task, std::size_t begin, std::size_t block) {
  const std::size_t left = task.count - begin;
  return left < block ? left : block;
}

/// Copies a finished block from the first output to the others. A loop: GCC makes slow `rep movs` of a small memcpy.
template <typename T>
void copy_block(const ReduceTask& task, std::size_t begin, std::size_t count) {
  const T* from = output_at<T>(task, 0, begin);
  for (std::size_t output = 1; output < task.output_count; ++output) {
    T* to = output_at<T>(task, output, begin);
#pragma omp simd
    for (std::size_t i = 0; i < count; ++i) to[i] = from[i];
  }
}

template <typename T, template <typename> class Operation>
void reduce_elements(const ReduceTask& task) {
  using Accumulator = decltype(load(T{}));
  using Op = Operation<Accumulator>;
  // Several passes make small blocks: in large ones the processor's prefetch of each input would come to a halt.
  constexpr std::size_t kSmallBlock = 1024 / sizeof(Accumulator);
  const std::size_t block = task.input_count > 2 ? kSmallBlock : 4 * kSmallBlock;
  const std::size_t divisor = task.divisor;
  const std::size_t last_input = task.input_count - 1;
  for (std::size_t begin = 0; begin < task.count; begin += block) {
    const std::size_t count = block_count(task, begin, block);
    T* out = output_at<T>(task, 0, begin);
    const T* first = input_at<T>(task, 0, begin);
    const T* last = input_at<T>(task, last_input, begin);
    const auto first_factor = Op::factor(task, 0);
    const auto last_factor = Op::factor(task, last_input);
    if (task.input_count == 1) {  // NOLINT(bugprone-branch-clone): the pragmas hide that the loops differ
#pragma omp simd
      for (std::size_t i = 0; i < count; ++i) {
        out[i] = static_cast<T>(Op::finish(Op::scale(load(first[i]), first_factor), divisor));
      }
    } else if (task.input_count == 2) {
#pragma omp simd
      for (std::size_t i = 0; i < count; ++i) {
        const Accumulator a = Op::scale(load(first[i]), first_factor);
        out[i] = static_cast<T>(Op::finish(Op::combine(a, Op::scale(load(last[i]), last_factor)), divisor));
      }
    } else {
      alignas(64) Accumulator partial[kSmallBlock];
      const T* second = input_at<T>(task, 1, begin);
      const auto second_factor = Op::factor(task, 1);
#pragma omp simd
      for (std::size_t i = 0; i < count; ++i) {
        const Accumulator a = Op::scale(load(first[i]), first_factor);
        partial[i] = Op::combine(a, Op::scale(load(second[i]), second_factor));
      }
      for (std::size_t input = 2; input < last_input; ++input) {
        const T* next = input_at<T>(task, input, begin);
        const auto factor = Op::factor(task, input);
#pragma omp simd
        for (std::size_t i = 0; i < count; ++i) {
          partial[i] = Op::combine(partial[i], Op::scale(load(next[i]), factor));
        }
      }
#pragma omp simd
      for (std::size_t i = 0; i < count; ++i) {
        const Accumulator b = Op::scale(load(last[i]), last_factor);
        out[i] = static_cast<T>(Op::finish(Op::combine(partial[i], b), divisor));
      }
    }
    copy_block<T>(task, begin, count);
  }
}

// 16-bit floats. A format converts sixteen of them at a time, so that no compiler is asked to vectorise across widths.
constexpr std::size_t kStep = 16;

struct BFloat16 {
  static void widen(const std::uint16_t* in, float* out) {
    for (std::size_t i = 0; i < kStep; ++i) out[i] = __builtin_bit_cast(float, static_cast<std::uint32_t>(in[i]) << 16);
  }
  // To the nearest, ties to even; a NaN keeps its sign and top bits and becomes quiet.
  static void narrow(const float* in, std::uint16_t* out) {
    for (std::size_t i = 0; i < kStep; ++i) {
      const auto bits = __builtin_bit_cast(std::uint32_t, in[i]);
      const std::uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
      out[i] = static_cast<std::uint16_t>(is_nan(in[i]) ? bits >> 16 | 0x40u : rounded);
    }
  }
};

// What does not fill a step is converted together with elements before it, a second time; fewer than a step are padded.
template <typename Format>
void widen(const std::uint16_t* in, std::size_t count, float* out) {
  if (count < kStep) {
    std::uint16_t padded[kStep] = {};
    float wide[kStep];
    for (std::size_t i = 0; i < count; ++i) padded[i] = in[i];
    Format::widen(padded, wide);
    for (std::size_t i = 0; i < count; ++i) out[i] = wide[i];
    return;
  }
  for (std::size_t i = 0; i + kStep <= count; i += kStep) Format::widen(in + i, out + i);
  if (count % kStep != 0) Format::widen(in + count - kStep, out + count - kStep);
}

template <typename Format>
void narrow(const float* in, std::size_t count, std::uint16_t* out) {
  if (count < kStep) {
    float padded[kStep] = {};
    std::uint16_t narrowed[kStep];
    for (std::size_t i = 0; i < count; ++i) padded[i] = in[i];
    Format::narrow(padded, narrowed);
    for (std::size_t i = 0; i < count; ++i) out[i] = narrowed[i];
    return;
  }
  for (std::size_t i = 0; i + kStep <= count; i += kStep) Format::narrow(in + i, out + i);
  if (count % kStep != 0) Format::narrow(in + count - kStep, out + count - kStep);
}

template <typename Format, template <typename> class Operation>
void reduce_halves(const ReduceTask& task) {
  using Op = Operation<float>;
  constexpr std::size_t kBlock = 256;
  alignas(64) float partial[kBlock];
  alignas(64) float next[kBlock];
  for (std::size_t begin = 0; begin < task.count; begin += kBlock) {
    const std::size_t count = block_count(task, begin, kBlock);
    widen<Format>(input_at<std::uint16_t>(task, 0, begin), count, partial);
    const auto first_factor = Op::factor(task, 0);
    for (std::size_t i = 0; i < count; ++i) partial[i] = Op::scale(partial[i], first_factor);
    for (std::size_t input = 1; input < task.input_count; ++input) {
      widen<Format>(input_at<std::uint16_t>(task, input, begin), count, next);
      const auto factor = Op::factor(task, input);
      for (std::size_t i = 0; i < count; ++i) partial[i] = Op::combine(partial[i], Op::scale(next[i], factor));
    }
    for (std::size_t i = 0; i < count; ++i) partial[i] = Op::finish(partial[i], task.divisor);
    narrow<Format>(partial, count, output_at<std::uint16_t>(task, 0, begin));
    copy_block<std::uint16_t>(task, begin, count);
  }
}

/// A complex number is two reals to whatever does not multiply two of them.
template <typename Real, template <typename> class Operation>
void reduce_parts(const ReduceTask& task) {
  ReduceTask parts = task;
  parts.count *= 2;
  reduce_elements<Real, Operation>(parts);
}

/// The parts are kept apart: given pairs, GCC takes a fused multiply-add for them in spite of -ffp-contract=off.
template <typename Real>
void multiply_complex(const ReduceTask& task) {
  constexpr std::size_t kBlock = 1024 / sizeof(Real);
  alignas(64) Real re[kBlock];
  alignas(64) Real im[kBlock];
  for (std::size_t begin = 0; begin < task.count; begin += kBlock) {
    const std::size_t count = block_count(task, begin, kBlock);
    const Real* first = input_at<Real>(task, 0, 2 * begin);
    for (std::size_t i = 0; i < count; ++i) {
      re[i] = first[2 * i];
      im[i] = first[2 * i + 1];
    }
    for (std::size_t input = 1; input < task.input_count; ++input) {
      const Real* next = input_at<Real>(task, input, 2 * begin);
      for (std::size_t i = 0; i < count; ++i) {
        const Real a = re[i];
        const Real b = im[i];
        const Real c = next[2 * i];
        const Real d = next[2 * i + 1];
        re[i] = a * c - b * d;
        im[i] = a * d + b * c;
      }
    }
    Real* out = output_at<Real>(task, 0, 2 * begin);
    for (std::size_t i = 0; i < count; ++i) {
      out[2 * i] = re[i];
      out[2 * i + 1] = im[i];
    }
    copy_block<Real>(task, 2 * begin, 2 * count);
  }
}

template <typename Real>
constexpr OperationKernels floating_kernels() {
  return {.sum = reduce_elements<Real, Sum>,
          .avg = reduce_elements<Real, Avg>,
          .product = reduce_elements<Real, Product>,
          .min = reduce_elements<Real, Min>,
          .max = reduce_elements<Real, Max>,
          .premul_sum = reduce_elements<Real, PremulSum>};
}

template <typename Format>
constexpr OperationKernels half_kernels() {
  return {.sum = reduce_halves<Format, Sum>,
          .avg = reduce_halves<Format, Avg>,
          .product = reduce_halves<Format, Product>,
          .min = reduce_halves<Format, Min>,
          .max = reduce_halves<Format, Max>,
          .premul_sum = reduce_halves<Format, PremulSum>};
}

/// `Bits` is T without sign, for what does not look at it: the 8-bit types share those kernels.
template <typename T, typename Bits>
constexpr OperationKernels integer_kernels() {
  return {.sum = reduce_elements<Bits, Sum>,
          .avg = reduce_elements<T, Avg>,
          .product = reduce_elements<Bits, Product>,
          .min = reduce_elements<T, Min>,
          .max = reduce_elements<T, Max>,
          .band = reduce_elements<Bits, Band>,
          .bor = reduce_elements<Bits, Bor>,
          .bxor = reduce_elements<Bits, Bxor>};
}

template <typename Real>
constexpr OperationKernels complex_kernels() {
  return {.sum = reduce_parts<Real, Sum>,
          .avg = reduce_parts<Real, Avg>,
          .product = multiply_complex<Real>,
          .premul_sum = reduce_parts<Real, PremulSum>};
}

/// `Half` is the format the instruction set has for it.
template <typename Half>
constexpr KernelTable kKernels = {
    .float32 = floating_kernels<float>(),
    .float64 = floating_kernels<double>(),
    .half = half_kernels<Half>(),
    .bfloat16 = half_kernels<BFloat16>(),
    .int8 = integer_kernels<std::int8_t, std::uint8_t>(),
    .int16 = integer_kernels<std::int16_t, std::uint16_t>(),
    .int32 = integer_kernels<std::int32_t, std::uint32_t>(),
    .int64 = integer_kernels<std::int64_t, std::uint64_t>(),
    .uint8 = integer_kernels<std::uint8_t, std::uint8_t>(),
    .boolean = {.sum = reduce_elements<Bool, Bor>,
                .product = reduce_elements<Bool, Band>,
                .min = reduce_elements<Bool, Band>,
                .max = reduce_elements<Bool, Bor>,
                .band = reduce_elements<Bool, Band>,
                .bor = reduce_elements<Bool, Bor>,
                .bxor = reduce_elements<Bool, Bxor>},
    .complex_float = complex_kernels<float>(),
    .complex_double = complex_kernels<double>(),
};

}  // namespace
}  // namespace lockstep::shm::detail
