#include "lockstep/shm/types.h"

#include <iterator>

namespace lockstep::shm {
namespace {

enum class Kind { kReal, kInteger, kBoolean, kComplex };

struct TypeTraits {
  const char* name;
  std::size_t bytes;
  Kind kind;
};

// In the order of DType.
constexpr TypeTraits kTypes[] = {
    {"float", 4, Kind::kReal},    {"double", 8, Kind::kReal},           {"half", 2, Kind::kReal},
    {"bfloat16", 2, Kind::kReal}, {"int8", 1, Kind::kInteger},          {"int16", 2, Kind::kInteger},
    {"int32", 4, Kind::kInteger}, {"int64", 8, Kind::kInteger},         {"uint8", 1, Kind::kInteger},
    {"bool", 1, Kind::kBoolean},  {"complex float", 8, Kind::kComplex}, {"complex double", 16, Kind::kComplex},
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
  const Kind kind = traits->kind;
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kProduct:
      return true;
    case ReduceOp::kAvg:
      return kind != Kind::kBoolean;
    case ReduceOp::kMin:
    case ReduceOp::kMax:
      return kind != Kind::kComplex;
    case ReduceOp::kBand:
    case ReduceOp::kBor:
    case ReduceOp::kBxor:
      return kind == Kind::kInteger || kind == Kind::kBoolean;
    case ReduceOp::kPremulSum:
      return kind == Kind::kReal || kind == Kind::kComplex;
  }
  return false;
}

}  // namespace lockstep::shm
