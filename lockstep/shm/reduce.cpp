#include "lockstep/shm/reduce.h"

#include <cassert>

#include "lockstep/shm/instruction_sets.h"

namespace lockstep::shm {
namespace detail {
namespace {

// By name, since the kernels are compiled without knowing the order of the enumerations.
constexpr OperationKernels KernelTable::*row_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat:
      return &KernelTable::float32;
    case DType::kDouble:
      return &KernelTable::float64;
    case DType::kHalf:
      return &KernelTable::half;
    case DType::kBFloat16:
      return &KernelTable::bfloat16;
    case DType::kInt8:
      return &KernelTable::int8;
    case DType::kInt16:
      return &KernelTable::int16;
    case DType::kInt32:
      return &KernelTable::int32;
    case DType::kInt64:
      return &KernelTable::int64;
    case DType::kUInt8:
      return &KernelTable::uint8;
    case DType::kBool:
      return &KernelTable::boolean;
    case DType::kComplexFloat:
      return &KernelTable::complex_float;
    case DType::kComplexDouble:
      return &KernelTable::complex_double;
    case DType::kFirstOther:
      break;
  }
  return nullptr;
}

constexpr ReduceKernel OperationKernels::*column_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return &OperationKernels::sum;
    case ReduceOp::kAvg:
      return &OperationKernels::avg;
    case ReduceOp::kProduct:
      return &OperationKernels::product;
    case ReduceOp::kMin:
      return &OperationKernels::min;
    case ReduceOp::kMax:
      return &OperationKernels::max;
    case ReduceOp::kBand:
      return &OperationKernels::band;
    case ReduceOp::kBor:
      return &OperationKernels::bor;
    case ReduceOp::kBxor:
      return &OperationKernels::bxor;
    case ReduceOp::kPremulSum:
      return &OperationKernels::premul_sum;
  }
  return nullptr;
}

const InstructionSet& chosen_set() {
  static const InstructionSet& set = best_instruction_set();
  return set;
}

}  // namespace

ReduceKernel kernel_of(const InstructionSet& set, ReduceOp op, DType dtype) {
  const auto row = row_of(dtype);
  return row == nullptr ? nullptr : set.kernels.*row.*column_of(op);
}

}  // namespace detail

void reduce(const Reduction& reduction, std::span<const std::byte* const> inputs, std::span<const double> factors,
            std::span<std::byte* const> outputs, std::size_t count) {
  const detail::ReduceKernel kernel = detail::kernel_of(detail::chosen_set(), reduction.op, reduction.dtype);
  assert(kernel != nullptr && !inputs.empty() && !outputs.empty());
  assert(factors.size() == (reduction.op == ReduceOp::kPremulSum ? inputs.size() : 0));
  kernel({.inputs = inputs.data(),
          .input_count = inputs.size(),
          .factors = factors.data(),
          .divisor = reduction.divisor,
          .outputs = outputs.data(),
          .output_count = outputs.size(),
          .count = count});
}

const char* instruction_set() {
  return detail::chosen_set().name;
}

}  // namespace lockstep::shm
