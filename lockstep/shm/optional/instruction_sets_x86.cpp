// Chooses by what the processor (and the operating system, for the wide registers) says it supports.
#include <cpuid.h>

#include "lockstep/shm/instruction_sets.h"

namespace lockstep::shm::detail {

extern const KernelTable baseline_kernels;
extern const KernelTable avx2_kernels;
extern const KernelTable avx512_kernels;

namespace {

constexpr InstructionSet kBaseline{.name = "baseline", .kernels = baseline_kernels, .slower = nullptr};
constexpr InstructionSet kAvx2{.name = "avx2", .kernels = avx2_kernels, .slower = &kBaseline};
constexpr InstructionSet kAvx512{.name = "avx512", .kernels = avx512_kernels, .slower = &kAvx2};

// Not known by name to the __builtin_cpu_supports() of every compiler.
bool supports_f16c() {
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

}  // namespace

const InstructionSet& best_instruction_set() {
  if (!__builtin_cpu_supports("avx2") || !supports_f16c()) return kBaseline;
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  return has_avx512 ? kAvx512 : kAvx2;
}

}  // namespace lockstep::shm::detail
