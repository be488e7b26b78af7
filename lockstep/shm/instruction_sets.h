// What reduce() dispatches to: one table of kernels for each instruction set the library was compiled for. Internal.
//
// Included by files compiled for instruction sets the machine may lack, hence plain structs and no standard library:
// the linker could keep their copy of an inline function for everybody.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lockstep::shm {

enum class DType : std::uint8_t;
enum class ReduceOp : std::uint8_t;

namespace detail {

/// reduce()'s arguments. `count` is in elements.
struct ReduceTask {
  const std::byte* const* inputs;
  std::size_t input_count;
  const double* factors;
  std::size_t divisor;
  std::byte* const* outputs;
  std::size_t output_count;
  std::size_t count;
};

using ReduceKernel = void (*)(const ReduceTask&);

/// One kernel for each ReduceOp; null where can_reduce() is false.
struct OperationKernels {
  ReduceKernel sum = nullptr;
  ReduceKernel avg = nullptr;
  ReduceKernel product = nullptr;
  ReduceKernel min = nullptr;
  ReduceKernel max = nullptr;
  ReduceKernel band = nullptr;
  ReduceKernel bor = nullptr;
  ReduceKernel bxor = nullptr;
  ReduceKernel premul_sum = nullptr;
};

/// One row for each DType.
struct KernelTable {
  OperationKernels float32;
  OperationKernels float64;
  OperationKernels half;
  OperationKernels bfloat16;
  OperationKernels int8;
  OperationKernels int16;
  OperationKernels int32;
  OperationKernels int64;
  OperationKernels uint8;
  OperationKernels boolean;
  OperationKernels complex_float;
  OperationKernels complex_double;
};

struct InstructionSet {
  const char* name;
  const KernelTable& kernels;
  /// The next best that runs wherever this one does; null after "baseline".
  const InstructionSet* slower;
};

/// The best this machine can run.
const InstructionSet& best_instruction_set();

/// Null where can_reduce() is false.
ReduceKernel kernel_of(const InstructionSet& set, ReduceOp op, DType dtype);

}  // namespace detail
}  // namespace lockstep::shm
