#include "lockstep/shm/types.h"

#include <iterator>

namespace lockstep::shm {
namespace {

enum class Number { kReal, kInteger, kBoolean, kComplex };

struct TypeTraits {
  const char* name;
  std::size_t bytes;
  Number number;
};

// In the order of DType.
constexpr TypeTraits kTypes[] = {
    {"float", 4, Number::kReal},    {"double", 8, Number::kReal},           {"half", 2, Number::kReal},
    {"bfloat16", 2, Number::kReal}, {"int8", 1, Number::kInteger},          {"int16", 2, Number::kInteger},
    {"int32", 4, Number::kInteger}, {"int64", 8, Number::kInteger},         {"uint8", 1, Number::kInteger},
    {"bool", 1, Number::kBoolean},  {"complex float", 8, Number::kComplex}, {"complex double", 16, Number::kComplex},
};

// Null for types of the caller's.
const TypeTraits* traits_of(DType dtype) {
  const auto number = static_cast<std::size_t>(dtype);
  return number < std::size(kTypes) ? &kTypes[number] : nullptr;
}

}  // namespace

std::size_t size_of(DType dtype) {
  const TypeTraits* traits = traits_of(dtype);
  return traits == nullptr ? 0 : traits->bytes;
}

std::string name_of(DType dtype) {
  const TypeTraits* traits = traits_of(dtype);
  return traits == nullptr ? "type " + std::to_string(static_cast<int>(dtype)) : traits->name;
}

const char* name_of(ReduceOp op) {
  constexpr const char* kNames[] = {"sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum"};
  return kNames[static_cast<std::size_t>(op)];
}

bool can_reduce(ReduceOp op, DType dtype) {
  const TypeTraits* traits = traits_of(dtype);
  if (traits == nullptr) return false;
  const Number number = traits->number;
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kProduct:
      return true;
    case ReduceOp::kAvg:
      return number != Number::kBoolean;
    case ReduceOp::kMin:
    case ReduceOp::kMax:
      return number != Number::kComplex;
    case ReduceOp::kBand:
    case ReduceOp::kBor:
    case ReduceOp::kBxor:
      return number == Number::kInteger || number == Number::kBoolean;
    case ReduceOp::kPremulSum:
      return number == Number::kReal || number == Number::kComplex;
  }
  return false;
}

}  // namespace lockstep::shm
