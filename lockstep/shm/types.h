// What shared-memory collectives know about the bytes they move: element types and reductions. No libtorch here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace lockstep::shm {

/// Element types that can be reduced. Others travel as kFirstOther plus a number of the caller's: only equality counts.
enum class DType : std::uint8_t {
  kFloat,
  kDouble,
  kHalf,
  kBFloat16,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kUInt8,
  kBool,
  kComplexFloat,
  kComplexDouble,
  kFirstOther = 64,
};

enum class ReduceOp : std::uint8_t { kSum, kAvg, kProduct, kMin, kMax, kBand, kBor, kBxor, kPremulSum };

/// Bytes of one element; 0 for types that cannot be reduced.
std::size_t size_of(DType dtype);

/// "float", "bfloat16", …; "type 70" for others.
std::string name_of(DType dtype);
/// "sum", "avg", …
const char* name_of(ReduceOp op);

/// False for what has no meaning, as c10d has it: bitwise operations on floats, order among complex numbers, averages
/// of booleans.
bool can_reduce(ReduceOp op, DType dtype);

}  // namespace lockstep::shm
