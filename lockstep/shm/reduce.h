// Elementwise reduction of the ranks' buffers: the arithmetic of every collective that computes.
//
// Always in the order of the inputs, and the same bits whatever the instruction set, the block or the alignment: half
// types are summed in float and rounded once at the end, and no multiply-add is fused. Picks AVX-512, AVX2 or what the
// compiler's baseline offers (SSE2, NEON) when first used.
#pragma once

#include <cstddef>
#include <span>

#include "lockstep/shm/types.h"

namespace lockstep::shm {

struct Reduction {
  DType dtype = DType::kFloat;
  ReduceOp op = ReduceOp::kSum;
  /// What an average divides by: the number of ranks. Integers are divided towards zero.
  std::size_t divisor = 1;
};

/// outputs[j][i] = inputs[0][i] op inputs[1][i] op …, for i < count. Premul-sum multiplies inputs[r] by factors[r];
/// `factors` is empty otherwise. An output may be one of the inputs, or overlap none. At least one input and output;
/// can_reduce(op, dtype) holds.
void reduce(const Reduction& reduction, std::span<const std::byte* const> inputs, std::span<const double> factors,
            std::span<std::byte* const> outputs, std::size_t count);

/// "avx512", "avx2" or "baseline": what reduce() uses here.
const char* instruction_set();

}  // namespace lockstep::shm
