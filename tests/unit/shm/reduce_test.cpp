// Against a naive model, element by element, for each instruction set this machine has.
#include "lockstep/shm/reduce.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <complex>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <random>
#include <vector>

#include "lockstep/shm/instruction_sets.h"

namespace lockstep::shm {
namespace {

using Bytes = std::vector<std::byte>;

constexpr DType kDTypes[] = {DType::kFloat, DType::kDouble, DType::kHalf,         DType::kBFloat16,
                             DType::kInt8,  DType::kInt16,  DType::kInt32,        DType::kInt64,
                             DType::kUInt8, DType::kBool,   DType::kComplexFloat, DType::kComplexDouble};
constexpr ReduceOp kOps[] = {ReduceOp::kSum,  ReduceOp::kAvg, ReduceOp::kProduct, ReduceOp::kMin,      ReduceOp::kMax,
                             ReduceOp::kBand, ReduceOp::kBor, ReduceOp::kBxor,    ReduceOp::kPremulSum};
constexpr std::size_t kCounts[] = {0, 1, 2, 3, 7, 16, 17, 1000, 4099};

// ---- The model: one element at a time, in the widest arithmetic that cannot hide a mistake.

/// A 16-bit float by its definition. `mantissa_bits` is 10 for half, 7 for bfloat16.
float decode(std::uint16_t bits, int mantissa_bits) {
  const int exponent_bits = 15 - mantissa_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1);
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const float sign = (bits & 0x8000) != 0 ? -1.0f : 1.0f;
  if (exponent == (1 << exponent_bits) - 1) {
    return mantissa != 0 ? std::numeric_limits<float>::quiet_NaN() : sign * std::numeric_limits<float>::infinity();
  }
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), 1 - bias - mantissa_bits);
  return sign * std::ldexp(static_cast<float>(mantissa + (1 << mantissa_bits)), exponent - bias - mantissa_bits);
}

/// To the nearest, ties to even: counts the units of the last place with the rounding of nearbyint.
std::uint16_t encode(float x, int mantissa_bits) {
  const int exponent_bits = 15 - mantissa_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int infinity = ((1 << exponent_bits) - 1) << mantissa_bits;
  const int sign = std::signbit(x) ? 0x8000 : 0;
  if (std::isnan(x)) return static_cast<std::uint16_t>(infinity | 1 << (mantissa_bits - 1));
  if (std::isinf(x)) return static_cast<std::uint16_t>(sign | infinity);
  if (x == 0) return static_cast<std::uint16_t>(sign);
  const int exponent = std::max(std::ilogb(x), 1 - bias);
  const int units =
      static_cast<int>(std::nearbyint(std::ldexp(std::fabs(static_cast<double>(x)), mantissa_bits - exponent)));
  // A full mantissa carries into the exponent by itself.
  const int bits = ((exponent + bias - 1) << mantissa_bits) + units;
  return static_cast<std::uint16_t>(sign | std::min(bits, infinity));
}

/// Stored, so that no compiler fuses it with the addition that follows.
template <typename Real>
Real times(Real a, Real b) {
  const volatile Real product = a * b;
  return product;
}

template <typename Real>
Real combine_reals(ReduceOp op, Real a, Real b) {
  switch (op) {
    case ReduceOp::kProduct:
      return times(a, b);
    case ReduceOp::kMin:
      return std::isnan(a) || std::isnan(b) ? std::numeric_limits<Real>::quiet_NaN() : std::min(a, b);
    case ReduceOp::kMax:
      return std::isnan(a) || std::isnan(b) ? std::numeric_limits<Real>::quiet_NaN() : std::max(a, b);
    default:
      return a + b;
  }
}

template <typename Real>
Real model(const Reduction& reduction, const std::vector<Real>& inputs, const std::vector<double>& factors) {
  std::optional<Real> total;
  for (std::size_t r = 0; r < inputs.size(); ++r) {
    const Real x = factors.empty() ? inputs[r] : times(inputs[r], static_cast<Real>(factors[r]));
    total = total ? combine_reals(reduction.op, *total, x) : x;
  }
  return reduction.op == ReduceOp::kAvg ? *total / static_cast<Real>(reduction.divisor) : *total;
}

template <typename Real>
std::complex<Real> model(const Reduction& reduction, const std::vector<std::complex<Real>>& inputs,
                         const std::vector<double>& factors) {
  std::optional<std::complex<Real>> total;
  for (std::size_t r = 0; r < inputs.size(); ++r) {
    const Real factor = factors.empty() ? 1 : static_cast<Real>(factors[r]);
    const std::complex<Real> x(times(inputs[r].real(), factor), times(inputs[r].imag(), factor));
    if (!total) {
      total = x;
    } else if (reduction.op == ReduceOp::kProduct) {
      // The textbook's, as torch has it: the standard's also repairs infinities.
      const std::complex<Real> a = *total;
      total = {times(a.real(), x.real()) - times(a.imag(), x.imag()),
               times(a.real(), x.imag()) + times(a.imag(), x.real())};
    } else {
      *total += x;
    }
  }
  return reduction.op == ReduceOp::kAvg ? *total / static_cast<Real>(reduction.divisor) : *total;
}

template <typename Int>
  requires std::is_integral_v<Int>
Int model(const Reduction& reduction, const std::vector<Int>& inputs, const std::vector<double>&) {
  Int total = inputs[0];
  for (std::size_t r = 1; r < inputs.size(); ++r) {
    const Int x = inputs[r];
    const auto a = static_cast<std::uint64_t>(std::int64_t{total});
    const auto b = static_cast<std::uint64_t>(std::int64_t{x});
    switch (reduction.op) {
      case ReduceOp::kProduct:
        total = static_cast<Int>(a * b);
        break;
      case ReduceOp::kMin:
        total = std::min(total, x);
        break;
      case ReduceOp::kMax:
        total = std::max(total, x);
        break;
      case ReduceOp::kBand:
        total = static_cast<Int>(a & b);
        break;
      case ReduceOp::kBor:
        total = static_cast<Int>(a | b);
        break;
      case ReduceOp::kBxor:
        total = static_cast<Int>(a ^ b);
        break;
      default:
        total = static_cast<Int>(a + b);
    }
  }
  if (reduction.op != ReduceOp::kAvg) return total;
  return static_cast<Int>(static_cast<std::int64_t>(total) / static_cast<std::int64_t>(reduction.divisor));
}

std::uint8_t model_bool(ReduceOp op, const std::vector<std::uint8_t>& inputs) {
  const auto is_true = [](std::uint8_t x) { return x != 0; };
  const auto trues = std::count_if(inputs.begin(), inputs.end(), is_true);
  switch (op) {
    case ReduceOp::kProduct:
    case ReduceOp::kMin:
    case ReduceOp::kBand:
      return trues == static_cast<std::ptrdiff_t>(inputs.size());
    case ReduceOp::kBxor:
      return trues % 2 != 0;
    default:
      return trues != 0;
  }
}

template <typename T>
std::vector<T> elements(const std::vector<const std::byte*>& inputs, std::size_t index) {
  std::vector<T> values(inputs.size());
  for (std::size_t r = 0; r < inputs.size(); ++r) std::memcpy(&values[r], inputs[r] + index * sizeof(T), sizeof(T));
  return values;
}

/// Calls f with the model's element at `index`, in the type it is stored in.
template <typename F>
void with_expected(const Reduction& reduction, const std::vector<const std::byte*>& inputs,
                   const std::vector<double>& factors, std::size_t index, F f) {
  const auto of_type = [&]<typename T>(T) { f(model(reduction, elements<T>(inputs, index), factors)); };
  const auto of_format = [&](int mantissa_bits) {
    std::vector<float> wide;
    for (const std::uint16_t bits : elements<std::uint16_t>(inputs, index)) wide.push_back(decode(bits, mantissa_bits));
    f(encode(model(reduction, wide, factors), mantissa_bits));
  };
  switch (reduction.dtype) {
    case DType::kFloat:
      return of_type(float{});
    case DType::kDouble:
      return of_type(double{});
    case DType::kHalf:
      return of_format(10);
    case DType::kBFloat16:
      return of_format(7);
    case DType::kInt8:
      return of_type(std::int8_t{});
    case DType::kInt16:
      return of_type(std::int16_t{});
    case DType::kInt32:
      return of_type(std::int32_t{});
    case DType::kInt64:
      return of_type(std::int64_t{});
    case DType::kUInt8:
      return of_type(std::uint8_t{});
    case DType::kBool:
      return f(model_bool(reduction.op, elements<std::uint8_t>(inputs, index)));
    case DType::kComplexFloat:
      return of_type(std::complex<float>{});
    case DType::kComplexDouble:
      return of_type(std::complex<double>{});
    case DType::kFirstOther:
      FAIL();
  }
}

Bytes expected_bytes(const Reduction& reduction, const std::vector<const std::byte*>& inputs,
                     const std::vector<double>& factors, std::size_t count) {
  Bytes expected(count * size_of(reduction.dtype));
  for (std::size_t i = 0; i < count; ++i) {
    with_expected(reduction, inputs, factors, i,
                  [&]<typename T>(T x) { std::memcpy(expected.data() + i * sizeof(T), &x, sizeof(T)); });
  }
  return expected;
}

// ---- Running it.

std::vector<const detail::InstructionSet*> instruction_sets() {
  std::vector<const detail::InstructionSet*> sets;
  for (const auto* set = &detail::best_instruction_set(); set != nullptr; set = set->slower) sets.push_back(set);
  return sets;
}

void reduce_with(const detail::InstructionSet& set, const Reduction& reduction,
                 const std::vector<const std::byte*>& inputs, const std::vector<double>& factors,
                 const std::vector<std::byte*>& outputs, std::size_t count) {
  detail::kernel_of(set, reduction.op, reduction.dtype)({.inputs = inputs.data(),
                                                         .input_count = inputs.size(),
                                                         .factors = factors.data(),
                                                         .divisor = reduction.divisor,
                                                         .outputs = outputs.data(),
                                                         .output_count = outputs.size(),
                                                         .count = count});
}

/// Values whose sums, products and averages round, but hold no NaN: which NaN an addition of two returns is not ours.
void fill(Bytes& bytes, DType dtype, std::mt19937_64& random) {
  std::normal_distribution<double> normal;
  const std::size_t size = size_of(dtype);
  const auto put_reals = [&]<typename Real>(Real) {
    for (std::size_t at = 0; at < bytes.size(); at += sizeof(Real)) {
      const auto x = static_cast<Real>(normal(random));
      std::memcpy(bytes.data() + at, &x, sizeof(x));
    }
  };
  switch (dtype) {
    case DType::kFloat:
    case DType::kComplexFloat:
      return put_reals(float{});
    case DType::kDouble:
    case DType::kComplexDouble:
      return put_reals(double{});
    case DType::kHalf:
    case DType::kBFloat16:
      for (std::size_t at = 0; at < bytes.size(); at += size) {
        // Of any magnitude, subnormals included.
        const int mantissa_bits = dtype == DType::kHalf ? 10 : 7;
        auto bits = static_cast<std::uint16_t>(random());
        if (!std::isfinite(decode(bits, mantissa_bits))) bits &= 0x3fff;
        std::memcpy(bytes.data() + at, &bits, size);
      }
      return;
    default:
      for (std::byte& byte : bytes) byte = random() % 4 == 0 ? std::byte{} : static_cast<std::byte>(random());
  }
}

std::vector<const std::byte*> addresses(const std::vector<Bytes>& buffers, std::size_t offset) {
  std::vector<const std::byte*> result;
  for (const Bytes& buffer : buffers) result.push_back(buffer.data() + offset);
  return result;
}

struct Extent {
  std::size_t inputs;
  std::size_t outputs;
  std::size_t count;
  bool in_place = false;
};

/// Buffers begin one element after where an allocation does, and the elements around them must not change.
void expect_output(const detail::InstructionSet& set, const Reduction& reduction, const std::vector<double>& factors,
                   const Extent& shape, std::vector<Bytes> in, const Bytes& expected) {
  const std::size_t size = size_of(reduction.dtype);
  const Bytes guard(size, std::byte{0x5a});
  std::vector<Bytes> out(shape.outputs, Bytes((shape.count + 2) * size, guard[0]));
  std::vector<std::byte*> outputs;
  for (std::size_t j = 0; j < shape.outputs; ++j) {
    // Backwards, so that the first output is not always the first input.
    const bool aliases = shape.in_place && j < shape.inputs;
    outputs.push_back((aliases ? in[shape.inputs - 1 - j] : out[j]).data() + size);
  }
  reduce_with(set, reduction, addresses(in, size), factors, outputs, shape.count);
  for (std::byte* output : outputs) {
    ASSERT_TRUE(std::equal(expected.begin(), expected.end(), output))
        << set.name << " " << name_of(reduction.op) << " of " << name_of(reduction.dtype) << ": " << shape.inputs
        << " inputs, " << shape.outputs << " outputs, " << shape.count << " elements"
        << (shape.in_place ? ", in place" : "");
  }
  for (const Bytes& bytes : out) {
    ASSERT_TRUE(std::equal(guard.begin(), guard.end(), bytes.begin()));
    ASSERT_TRUE(std::equal(guard.begin(), guard.end(), bytes.end() - static_cast<std::ptrdiff_t>(size)));
  }
}

/// With every instruction set.
void expect_model(ReduceOp op, DType dtype, const Extent& shape) {
  std::mt19937_64 random(shape.count * 31 + shape.inputs);
  const std::size_t size = size_of(dtype);
  const Reduction reduction{.dtype = dtype, .op = op, .divisor = shape.inputs + 1};
  std::vector<double> factors;
  for (std::size_t r = 0; op == ReduceOp::kPremulSum && r < shape.inputs; ++r)
    factors.push_back(0.7 + 0.1 * static_cast<double>(r));
  std::vector<Bytes> in(shape.inputs, Bytes((shape.count + 2) * size));
  for (Bytes& bytes : in) fill(bytes, dtype, random);
  const Bytes expected = expected_bytes(reduction, addresses(in, size), factors, shape.count);
  for (const auto* set : instruction_sets()) expect_output(*set, reduction, factors, shape, in, expected);
}

template <typename F>
void for_every_reduction(F f) {
  for (const DType dtype : kDTypes) {
    for (const ReduceOp op : kOps) {
      if (can_reduce(op, dtype)) f(op, dtype);
    }
  }
}

/// reduce() of buffers of T, with the instruction set it chooses.
template <typename T>
std::vector<T> reduce_vectors(const Reduction& reduction, const std::vector<std::vector<T>>& buffers,
                              const std::vector<double>& factors = {}) {
  std::vector<const std::byte*> inputs;
  for (const auto& buffer : buffers) inputs.push_back(reinterpret_cast<const std::byte*>(buffer.data()));
  std::vector<T> result(buffers[0].size());
  std::byte* const outputs[] = {reinterpret_cast<std::byte*>(result.data())};
  reduce(reduction, inputs, factors, outputs, result.size());
  return result;
}

TEST(Reduce, MatchesTheModelForEverySizeAndNumberOfInputs) {
  for_every_reduction([](ReduceOp op, DType dtype) {
    for (std::size_t inputs = 1; inputs <= 5; ++inputs) {
      for (const std::size_t count : kCounts) expect_model(op, dtype, {.inputs = inputs, .outputs = 1, .count = count});
    }
  });
}

TEST(Reduce, WritesEveryOutput) {
  for_every_reduction([](ReduceOp op, DType dtype) {
    for (const std::size_t count : kCounts) {
      expect_model(op, dtype, {.inputs = 2, .outputs = 2, .count = count});
      expect_model(op, dtype, {.inputs = 3, .outputs = 3, .count = count});
    }
  });
}

TEST(Reduce, WorksInPlace) {
  for_every_reduction([](ReduceOp op, DType dtype) {
    for (const std::size_t count : kCounts) {
      for (std::size_t inputs = 1; inputs <= 4; ++inputs) {
        expect_model(op, dtype, {.inputs = inputs, .outputs = 1, .count = count, .in_place = true});
        expect_model(op, dtype, {.inputs = inputs, .outputs = 3, .count = count, .in_place = true});
      }
    }
  });
}

TEST(Reduce, HasAKernelExactlyWhereItCanReduce) {
  for (const auto* set : instruction_sets()) {
    for (const DType dtype : kDTypes) {
      for (const ReduceOp op : kOps) {
        EXPECT_EQ(detail::kernel_of(*set, op, dtype) != nullptr, can_reduce(op, dtype))
            << name_of(op) << name_of(dtype);
      }
    }
    EXPECT_EQ(detail::kernel_of(*set, ReduceOp::kSum, DType::kFirstOther), nullptr);
  }
}

TEST(Reduce, NamesTheInstructionSetInUse) {
  EXPECT_STREQ(instruction_set(), detail::best_instruction_set().name);
  EXPECT_STREQ(instruction_sets().back()->name, "baseline");
}

TEST(Reduce, SumsInTheOrderOfTheInputs) {
  const std::vector<std::vector<float>> buffers = {{1e8f}, {-1e8f}, {1.0f}};
  EXPECT_EQ(reduce_vectors<float>({.dtype = DType::kFloat}, buffers), std::vector<float>{1.0f});
  EXPECT_EQ(reduce_vectors<float>({.dtype = DType::kFloat}, {{1.0f}, {1e8f}, {-1e8f}}), std::vector<float>{0.0f});
}

TEST(Reduce, SumsHalvesInFloatAndRoundsOnce) {
  // 2048 + 1 is a tie that half would round back to 2048, twice.
  EXPECT_EQ(reduce_vectors<std::uint16_t>({.dtype = DType::kHalf}, {{0x6800}, {0x3c00}, {0x3c00}}),
            std::vector<std::uint16_t>{0x6801});
  // 256 + 1 + 1 in bfloat16.
  EXPECT_EQ(reduce_vectors<std::uint16_t>({.dtype = DType::kBFloat16}, {{0x4380}, {0x3f80}, {0x3f80}}),
            std::vector<std::uint16_t>{0x4381});
}

TEST(Reduce, WidensEveryHalfExactly) {
  constexpr std::size_t kSame = 16;
  for (const auto* set : instruction_sets()) {
    for (const auto& [dtype, mantissa_bits] : {std::pair{DType::kHalf, 10}, std::pair{DType::kBFloat16, 7}}) {
      const std::uint16_t one = encode(1.0f, mantissa_bits);
      const std::vector<std::uint16_t> ones(kSame, one);
      for (int bits = 0; bits < 65536; ++bits) {
        const float x = decode(static_cast<std::uint16_t>(bits), mantissa_bits);
        const std::vector<std::uint16_t> halves(kSame, static_cast<std::uint16_t>(bits));
        std::vector<std::uint16_t> result(kSame);
        const std::vector<std::byte*> outputs = {reinterpret_cast<std::byte*>(result.data())};
        const std::vector<const std::byte*> inputs = {reinterpret_cast<const std::byte*>(halves.data()),
                                                      reinterpret_cast<const std::byte*>(ones.data())};
        if (std::isfinite(x)) {
          // Anything but the exact value leaves a difference.
          reduce_with(*set, {.dtype = dtype, .op = ReduceOp::kPremulSum}, inputs, {1.0, -x}, outputs, kSame);
          ASSERT_EQ(result, std::vector<std::uint16_t>(kSame, 0)) << set->name << " " << std::hex << bits;
        }
        reduce_with(*set, {.dtype = dtype, .op = ReduceOp::kSum}, {inputs[0]}, {}, outputs, kSame);
        if (std::isnan(x)) {
          ASSERT_TRUE(std::isnan(decode(result[0], mantissa_bits))) << set->name << " " << std::hex << bits;
        } else {
          ASSERT_EQ(result, halves) << set->name;
        }
      }
    }
  }
}

/// Rounds x to a 16-bit float: 1 times x, and no more.
std::uint16_t rounded(const detail::InstructionSet& set, DType dtype, float x) {
  const std::vector<std::uint16_t> ones(16, dtype == DType::kHalf ? 0x3c00 : 0x3f80);
  std::vector<std::uint16_t> result(16);
  reduce_with(set, {.dtype = dtype, .op = ReduceOp::kPremulSum}, {reinterpret_cast<const std::byte*>(ones.data())}, {x},
              {reinterpret_cast<std::byte*>(result.data())}, 16);
  EXPECT_EQ(result, std::vector<std::uint16_t>(16, result[0]));
  return result[0];
}

TEST(Reduce, RoundsToTheNearestHalfAndTiesToEven) {
  std::mt19937 random(7);
  std::vector<float> values = {std::numeric_limits<float>::infinity(),
                               std::numeric_limits<float>::max(),
                               std::numeric_limits<float>::denorm_min(),
                               0.0f,
                               65504.0f,
                               65519.996f,
                               65520.0f};
  for (const int mantissa_bits : {10, 7}) {
    for (int bits = 0; bits < 0x7fff; bits += 7) {
      // Each number, the tie above it, and the neighbours of both.
      const float x = decode(static_cast<std::uint16_t>(bits), mantissa_bits);
      const float next = decode(static_cast<std::uint16_t>(bits + 1), mantissa_bits);
      if (!std::isfinite(x) || !std::isfinite(next)) continue;
      const float tie = x + (next - x) / 2;
      for (const float y : {x, tie}) {
        values.insert(values.end(), {y, std::nextafter(y, 0.0f), std::nextafter(y, std::numeric_limits<float>::max())});
      }
    }
  }
  for (int i = 0; i < 50000; ++i) {
    const auto x = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
    if (!std::isnan(x)) values.push_back(x);
  }
  for (const auto* set : instruction_sets()) {
    for (const float x : values) {
      ASSERT_EQ(rounded(*set, DType::kHalf, x), encode(x, 10)) << set->name << " " << std::hexfloat << x;
      ASSERT_EQ(rounded(*set, DType::kHalf, -x), encode(-x, 10)) << set->name << " " << std::hexfloat << -x;
      ASSERT_EQ(rounded(*set, DType::kBFloat16, x), encode(x, 7)) << set->name << " " << std::hexfloat << x;
    }
  }
}

TEST(Reduce, LeavesTheSameNaNWhateverTheInstructionSet) {
  for (const auto* set : instruction_sets()) {
    for (std::uint32_t bits = 0x7f800001; bits < 0x80000000; bits += 4099) {
      const auto x = std::bit_cast<float>(bits);
      EXPECT_EQ(rounded(*set, DType::kHalf, x), 0x7e00 | (bits >> 13 & 0x3ff)) << set->name;
      EXPECT_EQ(rounded(*set, DType::kBFloat16, x), bits >> 16 | 0x40) << set->name;
    }
  }
}

TEST(Reduce, GivesTheSameBitsWithEveryInstructionSet) {
  constexpr std::size_t kCount = 5003;
  for_every_reduction([](ReduceOp op, DType dtype) {
    std::mt19937_64 random(11);
    std::vector<Bytes> in(3, Bytes(kCount * size_of(dtype)));
    for (Bytes& bytes : in) fill(bytes, dtype, random);
    const Reduction reduction{.dtype = dtype, .op = op, .divisor = 3};
    std::optional<Bytes> best;
    for (const auto* set : instruction_sets()) {
      Bytes result(in[0].size());
      reduce_with(*set, reduction, addresses(in, 0), {0.3, 0.4, 0.5}, {result.data()}, kCount);
      if (!best) best = result;
      EXPECT_TRUE(result == *best) << set->name << " " << name_of(op) << " of " << name_of(dtype);
    }
  });
}

TEST(Reduce, PropagatesNaNThroughMinAndMax) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
    for (const std::size_t count : {1, 40}) {
      const std::vector<float> nans(count, nan);
      const std::vector<float> numbers(count, 1.0f);
      for (const auto& inputs : {std::vector{nans, numbers}, {numbers, nans}, {numbers, nans, numbers}}) {
        for (const float x : reduce_vectors<float>({.dtype = DType::kFloat, .op = op}, inputs)) {
          EXPECT_TRUE(std::isnan(x)) << name_of(op);
        }
      }
      const std::vector<std::uint16_t> half_nans(count, 0x7e00);
      const std::vector<std::uint16_t> half_ones(count, 0x3c00);
      for (const auto& inputs : {std::vector{half_nans, half_ones}, {half_ones, half_nans}}) {
        EXPECT_EQ(reduce_vectors<std::uint16_t>({.dtype = DType::kHalf, .op = op}, inputs), half_nans) << name_of(op);
      }
    }
  }
}

TEST(Reduce, AveragesIntegersTowardsZero) {
  const Reduction avg{.dtype = DType::kInt32, .op = ReduceOp::kAvg, .divisor = 2};
  EXPECT_EQ(reduce_vectors<std::int32_t>(avg, {{-3, 3, -1, 7}, {0, 0, 0, 0}}),
            (std::vector<std::int32_t>{-1, 1, 0, 3}));
  const std::int64_t big = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(reduce_vectors<std::int64_t>({.dtype = DType::kInt64, .op = ReduceOp::kAvg, .divisor = 3},
                                         {{-big, big - 1}, {1, 0}}),
            (std::vector<std::int64_t>{(-big + 1) / 3, (big - 1) / 3}));
}

TEST(Reduce, DividesEveryQuotientOf32BitsExactly) {
  const std::int32_t lowest = std::numeric_limits<std::int32_t>::min();
  for (const std::int64_t divisor : {1, 2, 3, 7, 1000, 65537, 2147483647}) {
    const Reduction avg{.dtype = DType::kInt32, .op = ReduceOp::kAvg, .divisor = static_cast<std::size_t>(divisor)};
    std::vector<std::int32_t> values = {lowest, lowest + 1, -(lowest + 1), -1, 0, 1};
    for (std::int64_t multiple = divisor; multiple < 2147483647; multiple += divisor * 99991) {
      for (const std::int64_t off : {-1, 0, 1}) {
        values.push_back(static_cast<std::int32_t>(multiple + off));
        values.push_back(static_cast<std::int32_t>(-multiple + off));
      }
    }
    std::vector<std::int32_t> expected;
    for (const std::int64_t x : values) expected.push_back(static_cast<std::int32_t>(x / divisor));
    EXPECT_EQ(reduce_vectors<std::int32_t>(avg, {values}), expected) << divisor;
  }
}

TEST(Reduce, WrapsSmallIntegersBeforeDividing) {
  const Reduction avg{.dtype = DType::kInt8, .op = ReduceOp::kAvg, .divisor = 2};
  EXPECT_EQ(reduce_vectors<std::int8_t>(avg, {{100}, {100}}), std::vector<std::int8_t>{-28});
  // More ranks than the type can count.
  EXPECT_EQ(reduce_vectors<std::int8_t>({.dtype = DType::kInt8, .op = ReduceOp::kAvg, .divisor = 300}, {{100}}),
            std::vector<std::int8_t>{0});
}

TEST(Reduce, TakesAnyByteButZeroForTrue) {
  const std::vector<std::vector<std::uint8_t>> buffers = {{0, 2, 0, 255}, {0, 0, 4, 1}};
  const auto result = [&](ReduceOp op) {
    return reduce_vectors<std::uint8_t>({.dtype = DType::kBool, .op = op}, buffers);
  };
  using Expected = std::vector<std::uint8_t>;
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kBor})
    EXPECT_EQ(result(op), (Expected{0, 1, 1, 1}));
  for (const ReduceOp op : {ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kBand})
    EXPECT_EQ(result(op), (Expected{0, 0, 0, 1}));
  EXPECT_EQ(result(ReduceOp::kBxor), (Expected{0, 1, 1, 0}));
}

TEST(Reduce, MultipliesEachInputByItsFactor) {
  const Reduction premul{.dtype = DType::kFloat, .op = ReduceOp::kPremulSum};
  EXPECT_EQ(reduce_vectors<float>(premul, {{2.0f, 4.0f}, {10.0f, 20.0f}}, {0.5, 0.25}),
            (std::vector<float>{3.5f, 7.0f}));
  const Reduction complex{.dtype = DType::kComplexFloat, .op = ReduceOp::kPremulSum};
  using Complex = std::complex<float>;
  EXPECT_EQ(reduce_vectors<Complex>(complex, {{{1, 2}}, {{3, 4}}}, {2, 3}), (std::vector<Complex>{{11, 16}}));
}

TEST(Types, KnowsWhatCanBeReduced) {
  // Columns: sum avg product min max band bor bxor premul_sum.
  const auto row = [](DType dtype) {
    std::string marks;
    for (const ReduceOp op : kOps) marks += can_reduce(op, dtype) ? 'x' : '.';
    return marks;
  };
  for (const DType dtype : {DType::kFloat, DType::kDouble, DType::kHalf, DType::kBFloat16})
    EXPECT_EQ(row(dtype), "xxxxx...x");
  for (const DType dtype : {DType::kInt8, DType::kInt16, DType::kInt32, DType::kInt64, DType::kUInt8}) {
    EXPECT_EQ(row(dtype), "xxxxxxxx.");
  }
  EXPECT_EQ(row(DType::kBool), "x.xxxxxx.");
  for (const DType dtype : {DType::kComplexFloat, DType::kComplexDouble}) EXPECT_EQ(row(dtype), "xxx.....x");
  EXPECT_EQ(row(DType::kFirstOther), ".........");
  EXPECT_EQ(row(static_cast<DType>(70)), ".........");
}

TEST(Types, HaveSizesAndNames) {
  EXPECT_EQ(size_of(DType::kBFloat16), 2u);
  EXPECT_EQ(size_of(DType::kComplexDouble), 16u);
  EXPECT_EQ(size_of(static_cast<DType>(70)), 0u);
  EXPECT_EQ(name_of(DType::kBFloat16), "bfloat16");
  EXPECT_EQ(name_of(DType::kUInt8), "uint8");
  EXPECT_EQ(name_of(DType::kComplexDouble), "complex double");
  EXPECT_EQ(name_of(static_cast<DType>(70)), "type 70");
  EXPECT_STREQ(name_of(ReduceOp::kPremulSum), "premul_sum");
  EXPECT_STREQ(name_of(ReduceOp::kBand), "band");
}

}  // namespace
}  // namespace lockstep::shm
