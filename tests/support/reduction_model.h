// Random inputs every rank can draw for every other, and what a reduction of them must give, bit for bit: computed one
// rank after the other from rank 0 on.
#pragma once

#include <ATen/CPUGeneratorImpl.h>

#include <cstring>
#include <vector>

#include "lockstep/lockstep.h"

namespace lockstep::reduction_model {

// ---- Inputs

/// What rank `rank` gives: random numbers of both signs, the same wherever they are drawn.
inline at::Tensor input_of(int rank, int64_t size, at::ScalarType dtype, int salt = 0) {
  const auto seed = static_cast<uint64_t>(rank) * 1'000'003 + static_cast<uint64_t>(size) * 31 + salt;
  const auto random = at::detail::createCPUGenerator(seed);
  if (c10::isComplexType(dtype)) {
    const auto parts = at::rand({size, 2}, random, c10::toRealValueType(dtype)) * 4 - 2;
    return at::view_as_complex(parts);
  }
  if (c10::isFloatingType(dtype)) return (at::rand({size}, random, at::kDouble) * 4 - 2).to(dtype);
  if (dtype == at::kBool || dtype == at::kByte)
    return at::randint(dtype == at::kBool ? 2 : 256, {size}, random).to(dtype);
  const int64_t bound = dtype == at::kChar    ? 128
                        : dtype == at::kShort ? 32'768
                        : dtype == at::kInt   ? 1LL << 31
                                              : 1LL << 40;
  return at::randint(-bound, bound, {size}, random, at::kLong).to(dtype);
}

inline double factor_of(int rank) {
  return 1.0 / (3 + rank);
}

// ---- The model

/// False for what shm refuses: bitwise operations on floats, order among complex numbers, averages of booleans,
/// factors of integers.
inline bool has_meaning(ReduceOp op, at::ScalarType dtype) {
  const bool is_integer = c10::isIntegralType(dtype, /*includeBool=*/true);
  switch (op) {
    case ReduceOp::AVG:
      return dtype != at::kBool;
    case ReduceOp::MIN:
    case ReduceOp::MAX:
      return !c10::isComplexType(dtype);
    case ReduceOp::BAND:
    case ReduceOp::BOR:
    case ReduceOp::BXOR:
      return is_integer;
    case ReduceOp::PREMUL_SUM:
      return !is_integer;
    default:
      return true;
  }
}

inline at::Tensor product_of(const at::Tensor& a, const at::Tensor& b) {
  if (!a.is_complex()) return a * b;
  // Written out: torch may compute it in another way.
  const auto x = at::view_as_real(a).unbind(1);
  const auto y = at::view_as_real(b).unbind(1);
  return at::complex(x[0] * y[0] - x[1] * y[1], x[0] * y[1] + x[1] * y[0]);
}

inline at::Tensor combine(const at::Tensor& a, const at::Tensor& b, ReduceOp op) {
  switch (op) {
    case ReduceOp::PRODUCT:
      return product_of(a, b);
    case ReduceOp::MIN:
      return at::minimum(a, b);
    case ReduceOp::MAX:
      return at::maximum(a, b);
    case ReduceOp::BAND:
      return at::bitwise_and(a, b);
    case ReduceOp::BOR:
      return at::bitwise_or(a, b);
    case ReduceOp::BXOR:
      return at::bitwise_xor(a, b);
    default:
      return a + b;
  }
}

/// `inputs` by rank. Half types are computed in float and rounded once.
inline at::Tensor model_of(const std::vector<at::Tensor>& inputs, ReduceOp op) {
  const auto dtype = inputs[0].scalar_type();
  const bool is_half = dtype == at::kHalf || dtype == at::kBFloat16;
  const bool is_pair = inputs[0].is_complex() && op != ReduceOp::PRODUCT;
  at::Tensor total;
  for (std::size_t rank = 0; rank < inputs.size(); ++rank) {
    auto next = is_half ? inputs[rank].to(at::kFloat) : is_pair ? at::view_as_real(inputs[rank]) : inputs[rank];
    if (op == ReduceOp::PREMUL_SUM) next = next * factor_of(static_cast<int>(rank));
    total = rank == 0 ? next : combine(total, next, op);
  }
  const auto ranks = static_cast<int64_t>(inputs.size());
  if (op == ReduceOp::AVG) total = total.is_floating_point() ? total / ranks : at::div(total, ranks, "trunc");
  return is_pair ? at::view_as_complex(total.contiguous()) : total.to(dtype);
}

inline bool have_same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() && a.is_contiguous() && b.is_contiguous() &&
         (a.numel() == 0 || std::memcmp(a.data_ptr(), b.data_ptr(), a.nbytes()) == 0);
}

}  // namespace lockstep::reduction_model
