// The kernels compiled for AVX-512 (F, BW, VL, DQ) with F16C; flags in cmake/LockstepShm.cmake.
#include "lockstep/shm/optional/half_f16c.h"
#include "lockstep/shm/reduce_kernels.h"

namespace lockstep::shm::detail {

extern const KernelTable avx512_kernels;
const KernelTable avx512_kernels = kKernels<F16cHalf>;

}  // namespace lockstep::shm::detail
